"""Turns of episodes are valued by the workers of a run: the record has what continuations earned,
which are those that `fork` draws; what is lost on the way costs a value and never an episode.

Method: runs of the simulated engine whose environments and rewards follow from what was said; and a
worker alone, to which things happen while it samples values.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.audit.replay_trajectory import recorded_trajectory
from dora_pipe.audit.worker_log import started_of
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.core.errors import ConfigError, SchemaError
from dora_pipe.observe.lineage import policy_after
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    RewardCall,
    TaskEvent,
    TaskFacts,
    TaskFailed,
)
from dora_pipe.producers.worker.request import Phase
from dora_pipe.producers.worker.role import turn_values_by_source
from dora_pipe.producers.worker.valuation import is_valued
from dora_pipe.schemas.control import RequestFailed, TrajectoryLogged, WorkerLeft
from dora_pipe.schemas.rounds import Drain
from dora_pipe.schemas.trajectory import Trajectory, check_fields
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from dora_pipe.schemas.turn_values import turn_places
from tests.support import fork_stage
from tests.support.cluster import make_config
from tests.support.command_line import Call
from tests.support.fork_stage import Puzzles, install
from tests.support.inline_tasks import failed
from tests.support.metrics import values_of
from tests.support.recorded_run import RecordedRun, audited
from tests.support.stats_stage import stats_of
from tests.support.worker import World

VALUED: dict[str, Any] = {
    "groups__turn_values_share": 0.5,
    "groups__turn_values_samples": 3,
    "objective__advantage": "turns",
}
KEYS: dict[str, Any] = {"turn_values": {"train": 1.0}, "turn_value_samples": 3}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("values") / "run", Puzzles, **VALUED)


def trajectories(run: RecordedRun) -> list[Trajectory]:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        names = tables.query("select trajectory_id from trajectories where reward is not null")
        return [recorded_trajectory(bus, run.topics, tables, name) for (name,) in sorted(names)]


def test_the_chosen_share_has_a_value_at_every_later_turn(run: RecordedRun) -> None:
    found = trajectories(run)
    valued = [one for one in found if one.meta.turn_values]
    several = [one for one in found if len(turn_places(one.segments)) > 1]
    assert valued == [one for one in several if is_valued(one.meta.seed, 0.5)]
    assert 0 < len(valued) < len(several)
    for one in valued:
        later = list(turn_places(one.segments).values())[1:]
        assert [value.token for value in one.meta.turn_values] == later
        assert {value.samples for value in one.meta.turn_values} == {3}
        assert all(value.sampled >= 3 for value in one.meta.turn_values)


def test_values_in_the_log_are_those_that_fork_samples(
    run: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one = next(one for one in trajectories(run) if len(one.meta.turn_values) == 3)
    install(monkeypatch, Puzzles)
    words = ("--samples", 3, "--json", "--out", tmp_path)
    code, out, err = call("fork", run.directory, one.trajectory, *words)
    assert code == 0, err
    _, *turns = json.loads(out)["turns"]
    again = [(turn["token"], turn["mean"], turn["sampled"]) for turn in turns]
    assert again == [(each.token, each.mean, each.sampled) for each in one.meta.turn_values]


def test_a_run_with_values_keeps_every_promise(run: RecordedRun) -> None:
    found = audited(run)
    assert found.holds, found.violations


def test_what_values_cost_is_a_counter(run: RecordedRun, recorded: RecordedRun) -> None:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        stats = stats_of(bus, run.topics)
        steps = tables.query("select group_id from groups where fate = 'trained'")
    in_steps = {group for (group,) in steps}
    told = [one for one in trajectories(run) if one.trajectory.rpartition("-")[0] in in_steps]
    valued = [one.meta.turn_values for one in told]
    cost = sum(value.sampled for values in valued for value in values)
    assert stats.turn_value_tokens == cost > 0
    assert values_of(stats)["dora_pipe_turn_value_tokens_total"] == cost
    with closing(recorded.open()) as bus:
        assert stats_of(bus, recorded.topics).turn_value_tokens is None


class Stage:
    """A worker that has an episode with all its turns, and samples what they are worth."""

    def __init__(
        self, tasks: Callable[[], Puzzles] = Puzzles, *, slots: int = 4, wait: bool = True
    ) -> None:
        self.world = World(lengths=lambda seed, turn: 2 + (seed >> 9) % 6)
        self.tasks = tasks()
        self.worker = self.world.start(tasks=self.tasks, max_tokens=150, slots=slots, **KEYS)
        self.place = self.world.place(self.worker, 0)
        self.world.decide(self.place)
        if wait:
            self.world.until(self.worker, self.is_valuing)

    def is_valuing(self) -> bool:
        return self.worker.machine.requests.in_phase(Phase.VALUING) == 1 and self.open > 0

    @property
    def open(self) -> int:
        """Continuations in the worker."""
        found = self.worker.machine.requests.by_key.values()
        return sum(one.continuation is not None for one in found)

    def finish(self) -> Trajectory:
        self.world.until_idle(self.worker)
        (found,) = self.world.trajectories().values()
        return found


def test_continuations_are_no_requests_of_anybody_and_nothing_of_them_is_logged() -> None:
    stage = Stage()
    assert stage.worker.machine.requests.placed == 1
    one = stage.finish()
    assert [value.samples for value in one.meta.turn_values] == [3, 3, 3]
    assert len(stage.world.facts(TrajectoryLogged)) == 1
    assert stage.world.facts(RequestFailed) == []
    named = {record.key for record in stage.world.records("r.progress")}
    assert named == {one.trajectory.encode()}


@pytest.mark.parametrize("slots", [1, 2, 16])
def test_values_do_not_depend_on_how_many_are_sampled_at_a_time(slots: int) -> None:
    stage = Stage(slots=slots)
    most = 0

    def idle() -> bool:
        nonlocal most
        most = max(most, stage.open)
        return not stage.worker.machine.requests.by_key

    stage.world.until(stage.worker, idle)
    assert most <= slots
    assert stage.finish().meta.turn_values == Stage().finish().meta.turn_values


def test_a_worker_that_drains_samples_them_and_one_that_stops_logs_the_episode_without() -> None:
    drained = Stage()
    epoch = drained.worker.setup.epoch
    drained.world.decide(Drain(reason="t", worker="w0", epoch=epoch))
    drained.world.until(drained.worker, lambda: drained.worker.machine.finished)
    (one,) = drained.world.trajectories().values()
    assert len(one.meta.turn_values) == 3
    stopped = Stage()
    stopped.world.stop(stopped.worker)
    (one,) = stopped.world.trajectories().values()
    assert len(one.meta.turn_values) < 3
    assert one.reward is not None
    assert stopped.world.facts(WorkerLeft)[-1].progress == {}


def test_a_cancelled_episode_takes_its_continuations_with_it() -> None:
    stage = Stage()
    stage.world.decide(stage.world.cancel(stage.place))
    stage.world.until_idle(stage.worker)
    assert stage.world.trajectories() == {}
    assert stage.open == 0
    assert stage.worker.engine.active == 0


def test_another_version_does_not_come_before_they_are_sampled() -> None:
    stage = Stage()
    stage.world.decide(stage.world.assign(stage.worker, 1))
    stage.world.ticks(stage.worker, 2)
    assert stage.worker.machine.hosted.version == 0
    stage.world.until(stage.worker, lambda: stage.worker.machine.hosted.version == 1)
    assert stage.finish().meta.turn_values == Stage().finish().meta.turn_values


def test_a_task_process_that_dies_costs_no_value() -> None:
    stage = Stage()
    keys = [
        key
        for key, one in stage.worker.machine.requests.by_key.items()
        if one.continuation is not None
    ]
    for key in keys:
        stage.tasks.told.pop(key, None)
        stage.tasks.lose(key)
    assert stage.finish().meta.turn_values == Stage().finish().meta.turn_values
    assert stage.world.facts(RequestFailed) == []


def test_a_reward_that_fails_is_no_sample() -> None:
    class Strict(Puzzles):
        def _score(self, call: RewardCall) -> TaskEvent:
            return failed(call) if ".1/" in call.request else super()._score(call)

    one = Stage(Strict).finish()
    assert [value.samples for value in one.meta.turn_values] == [2, 2, 2]


def test_an_environment_that_answers_otherwise_values_nothing_and_the_episode_stays() -> None:
    """Of the answers that are compared, and of the last one, which no worker compares."""

    class Fickle(Puzzles):
        def _respond(self, call: EnvStep) -> TaskEvent:
            found = super()._respond(call)
            assert isinstance(found, EnvObserved)
            another = "9" if "." in call.request else ""
            return msgspec.structs.replace(found, text=f"{found.text} {another}")

    stage = Stage(Fickle)
    one = stage.finish()
    assert one.meta.turn_values == ()
    assert one.reward is not None
    assert stage.worker.counts["turn values not sampled: ReplayDiffers"] == 9
    assert stage.world.facts(RequestFailed) == []


def test_an_environment_that_fails_is_no_sample() -> None:
    class Broken(Puzzles):
        def _respond(self, call: EnvStep) -> TaskEvent:
            found = super()._respond(call)
            late = self.told[call.request] == fork_stage.TURNS and ".0/" in call.request
            return (
                TaskFailed(request=call.request, error="KeyError", message="no") if late else found
            )

    one = Stage(Broken).finish()
    assert {value.samples for value in one.meta.turn_values} <= {2, 3}
    assert any(value.samples == 2 for value in one.meta.turn_values)


def _with_values(one: Trajectory, *values: Any) -> Trajectory:
    return replace(one, meta=msgspec.structs.replace(one.meta, turn_values=values))


def test_values_of_places_where_no_turn_begins_are_refused(run: RecordedRun) -> None:
    one = next(one for one in trajectories(run) if len(one.meta.turn_values) == 3)
    value, _ = encode_trajectory(one)
    assert decode_trajectory(value).meta.turn_values == one.meta.turn_values
    first, second, _ = one.meta.turn_values
    for wrong in (
        (msgspec.structs.replace(first, token=first.token + 1),),
        (msgspec.structs.replace(first, token=one.meta.prompt_tokens),),
        (second, first),
        (msgspec.structs.replace(first, mean=float("inf")),),
        (msgspec.structs.replace(first, samples=0),),
    ):
        with pytest.raises(SchemaError, match="turn"):
            check_fields(_with_values(one, *wrong))


def test_a_share_is_chosen_by_seed() -> None:
    chosen = [seed for seed in range(2000) if is_valued(seed, 0.25)]
    assert 400 < len(chosen) < 600
    assert [seed for seed in range(2000) if is_valued(seed, 1.0)] == list(range(2000))
    assert not any(is_valued(seed, 0.0) for seed in range(2000))


def test_values_that_no_task_can_have_are_refused_before_a_worker_joins() -> None:
    config = make_config(**VALUED)
    facts = TaskFacts(
        train_digest="a", train_rows=1, eval_digest="b", eval_rows=1, reward_digest="c"
    )
    able = msgspec.structs.replace(facts, single_turn=False, replayable=True)
    assert turn_values_by_source(config, {"train": able, "eval": able}) == {"train": 0.5}
    assert turn_values_by_source(make_config(), {"train": able}) == {}
    together = msgspec.structs.replace(able, scores_groups=True)
    drawn = msgspec.structs.replace(able, replayable=False)
    for unable in (facts, together, drawn):
        with pytest.raises(ConfigError, match="no task of this run has turns"):
            turn_values_by_source(config, {"train": unable, "eval": able})


def test_a_continuation_of_a_run_with_values_is_not_valued_itself(run: RecordedRun) -> None:
    with closing(run.open()) as bus:
        started, _ = policy_after(bus, run.topics, 0)
    assert started.config["groups"]["turn_values_share"] == 0.5
    found = started_of(started, "g0000000001-000-v0")
    assert found.config["groups"]["turn_values_share"] == 0.0
    found.check_config()
