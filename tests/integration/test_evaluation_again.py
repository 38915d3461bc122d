"""Evaluations of episodes, and of siblings that are scored together, asked again of any weights: of
those that the run evaluated they say what its own evaluation said.

Method: runs of the simulated engine, whose tokens are a function of weights, seed and position, and
environments whose answers follow from what they were told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.evaluation_log import NAME
from dora_pipe.audit.bisect import Values
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.audit.repeat_steps import MadeWeights
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.cli import probes
from dora_pipe.cli.probes import Probe, opened_probe
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.config.model import Task
from dora_pipe.core.errors import TaskError, UsageError
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import GroupCall, GroupRewarded, RewardCall, TaskEvent
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.kept_parts import KeptParts
from dora_pipe.schemas.control import GroupScored, RunStarted, TrajectoriesLogged, decode_control
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from tests.support import fork_stage
from tests.support.fork_stage import Puzzles, digest, install
from tests.support.inline_tasks import InlineTasks, failed
from tests.support.recorded_run import RecordedRun

PROMPTS, SIBLINGS = 3, 4
DRAWS = PROMPTS * SIBLINGS
ENDED_AFTER = 200
"""Steps of the engine: some episodes are over by then."""

EVALUATION = {"evaluation__prompts": PROMPTS, "evaluation__siblings": SIBLINGS}


class Ranked(Puzzles):
    """Its siblings are also scored together: by what all of them have said."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.group = self._together

    def _together(self, call: GroupCall) -> TaskEvent:
        said = [digest(str(one.turns)) for one in call.completions]
        rewards = tuple(float(sorted(said).index(one)) for one in said)
        return GroupRewarded(
            request=call.request, rewards=rewards, parts=tuple({"rank": one} for one in rewards)
        )


@pytest.fixture(scope="module")
def episodes(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return fork_stage.record(tmp_path_factory.mktemp("asked") / "run", Puzzles, **EVALUATION)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    together = {"task__kind": "mine:Task", "task__rewards": [{"use": "mine:rank", "group": True}]}
    place = tmp_path_factory.mktemp("ranked") / "run"
    return fork_stage.record(place, Ranked, **EVALUATION, **together)


class Asked:
    """Probes of a copy of a run, each as another command would have it."""

    def __init__(self, run: RecordedRun, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place, self._monkeypatch = place, monkeypatch
        self._stack = ExitStack()
        self.run: OpenRun = self._stack.enter_context(opened(str(run.directory)))

    def begin(self, tasks: Callable[[], InlineTasks], **facts: Any) -> Probe:
        install(self._monkeypatch, tasks, **facts)
        probe = self._stack.enter_context(opened_probe(self.run, "eval", None, CommandProgress()))
        probe.begin(self.place)
        return probe

    def of(self, probe: Probe, version: int, first: int, last: int) -> Values:
        with closing(self.run.tables()) as tables:
            ((weights,),) = tables.query("select digest from versions where version = ?", [version])
        made = MadeWeights(of=f"version {version}", digest=weights)
        return probe.values(self.run.policies.weights(weights), made, first, last)

    def logged(self, version: int) -> list[float | None]:
        """What the run's own evaluation of a version said, in the order of draws."""
        with closing(self.run.tables()) as tables:
            rows = tables.query(
                "select t.reward from groups g join trajectories t using (group_id)"
                " where g.fate = 'evaluated' and g.version = ? order by g.row, t.sibling",
                [version],
            )
        return [one for (one,) in rows]

    def sampled(self) -> list[Trajectory]:
        """All that lies in the logs of what was asked."""
        return [decode_trajectory(value) for value in self._logged("trajectories")]

    def facts(self) -> list[Any]:
        """What control says in these logs."""
        return [decode_control(value) for value in self._logged("control")]

    def _logged(self, topic: str) -> Iterator[bytes]:
        for log in self.place.glob("sampled/*/log.sqlite"):
            with closing(SqliteBus(log)) as bus:
                for record in records_of(bus, ends_of(bus, f"{NAME}.{topic}")):
                    yield record.value

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def asked(
    episodes: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Asked]:
    with closing(Asked(episodes, tmp_path, monkeypatch)) as found:
        yield found


@pytest.mark.parametrize("version", [0, 1])
def test_episodes_of_equal_weights_have_the_rewards_that_the_run_gave_them(
    asked: Asked, version: int
) -> None:
    probe = asked.begin(Puzzles)
    found = asked.of(probe, version, 0, DRAWS)
    assert found == asked.logged(version)
    assert len({*found}) == 2
    assert any(len({*one.segments}) > 3 for one in asked.sampled()), "there are several turns"


def test_a_task_that_the_probe_does_not_sample_is_not_started(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, pool, names = probes.sampled_as, KeptParts.pool, list[str]()

    def with_another(run: OpenRun) -> RunStarted:
        found = started(run)
        more = [{**found.config["task"], "kind": "sandbox:Task", "name": "other"}]
        return msgspec.structs.replace(found, config={**found.config, "more_tasks": more})

    def noted(self: KeptParts, task: Task, **how: Any) -> TaskPool:
        names.append(task.name)
        return pool(self, task, **how)

    monkeypatch.setattr(probes, "sampled_as", with_another)
    monkeypatch.setattr(KeptParts, "pool", noted)
    assert asked.of(asked.begin(Puzzles), 1, 0, DRAWS) == asked.logged(1)
    assert set(names) == {""}


def test_draws_behind_the_last_row_are_of_other_seeds_and_the_same_however_they_are_asked(
    asked: Asked,
) -> None:
    probe = asked.begin(Puzzles)
    whole = asked.of(probe, 0, 0, 2 * DRAWS + 1)
    seeds = [one.meta.seed for one in asked.sampled()]
    assert len({*seeds}) == len(seeds) == 2 * DRAWS + 1
    asked.place = asked.place / "again"
    probe.begin(asked.place)
    parts = [*asked.of(probe, 0, 0, 7), *asked.of(probe, 0, 7, 2 * DRAWS + 1)]
    assert parts == whole


def test_two_versions_draw_the_same_random_streams(asked: Asked) -> None:
    probe = asked.begin(Puzzles)
    values = [asked.of(probe, version, 0, DRAWS) for version in (0, 1)]
    by_name: dict[str, list[Trajectory]] = {}
    for one in asked.sampled():
        by_name.setdefault(one.trajectory, []).append(one)
    assert values[0] != values[1]
    for one, other in by_name.values():
        assert (one.meta.seed, one.meta.index) == (other.meta.seed, other.meta.index)
        assert one.digest != other.digest


def scored(run: OpenRun, version: int) -> list[float]:
    """What the siblings of the run's groups of an evaluation came to together, group by group."""
    with closing(run.tables()) as tables:
        names = tables.query(
            "select group_id from groups where fate = 'evaluated' and version = ? order by row",
            [version],
        )
    facts = records_of(run.bus, ends_of(run.bus, run.topics.control))
    every = (decode_control(one.value) for one in facts)
    answers = {one.group: one for one in every if isinstance(one, GroupScored)}
    return [one.reward for (name,) in names for one in answers[name].siblings]


def test_siblings_that_are_scored_together_have_what_their_group_gave_them(
    ranked: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Asked(ranked, tmp_path, monkeypatch)) as asked:
        probe = asked.begin(Ranked, scores_groups=True)
        found = asked.of(probe, 1, 0, DRAWS)
        assert found == scored(asked.run, 1)
        assert max(one or 0.0 for one in found) > 1.0
        assert asked.of(probe, 1, 5, 7) == found[5:7], "a part of a group has it as a whole"
        asked.place = asked.place / "again"
        probe.begin(asked.place)
        assert asked.of(probe, 1, 5, 6) == found[5:6]
        assert len(asked.sampled()) == SIBLINGS, "all of the group are sampled for one of it"


def test_what_was_ended_goes_on_and_samples_nothing_twice(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, step = 0, SimulatedEngine.step

    def ended(engine: SimulatedEngine) -> list[Any]:
        nonlocal steps
        steps += 1
        if steps <= ENDED_AFTER:
            return step(engine)
        if any(isinstance(one, TrajectoriesLogged) for one in asked.facts()):
            raise KeyboardInterrupt
        return []  # control says nothing yet of the episodes that are over

    monkeypatch.setattr(SimulatedEngine, "step", ended)
    with pytest.raises(KeyboardInterrupt):
        asked.of(asked.begin(Puzzles), 0, 0, DRAWS)
    there = {one.trajectory: one.meta.epoch for one in asked.sampled()}
    assert 0 < len(there) < DRAWS
    monkeypatch.setattr(SimulatedEngine, "step", step)
    assert asked.of(asked.begin(Puzzles), 0, 0, DRAWS) == asked.logged(0)
    again = [(one.trajectory, one.meta.epoch) for one in asked.sampled()]
    # One more where its record was there, and control did not say so yet.
    assert DRAWS <= len(again) < DRAWS + len(there)
    assert there.items() <= {*again}


def without(*lost: int) -> type[Puzzles]:
    """Of these calls for a reward, counted from 0, none is answered in the time that it has."""
    calls = iter(range(10_000))

    class Lossy(Puzzles):
        def _score(self, call: RewardCall) -> TaskEvent:
            found = super()._score(call)
            return failed(call, "Retry", "busy") if next(calls) in lost else found

    return Lossy


def test_an_episode_without_a_reward_does_not_count_and_is_said_with_why(
    asked: Asked, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked.of(asked.begin(without(0, 5)), 0, 0, DRAWS)
    expected = asked.logged(0)
    assert sum(one is None for one in found) == 2
    both = zip(found, expected, strict=True)
    assert all(one is None or one == other for one, other in both)
    assert "2 of 12 draws of version 0 have no valid reward" in (said := capsys.readouterr().err)
    assert "Retry 2" in said


def test_where_no_draw_has_a_reward_nothing_is_decided(asked: Asked) -> None:
    probe = asked.begin(without(*range(100)))
    with pytest.raises(TaskError, match="no draw of version 0 has a valid reward: Retry 12"):
        asked.of(probe, 0, 0, DRAWS)


def test_an_evaluation_without_rows_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fork_stage.record(tmp_path / "none", Puzzles)
    with (
        closing(Asked(run, tmp_path, monkeypatch)) as asked,
        pytest.raises(UsageError, match="no rows"),
    ):
        asked.begin(Puzzles)
