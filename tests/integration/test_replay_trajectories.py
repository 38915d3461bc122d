"""Trajectories generated again from seed, settings and weights: equal, or the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from dora_pipe.audit.replay_trajectory import (
    Regenerated,
    engines_of,
    pick,
    prefill_segments,
    raise_if_different,
    regenerate,
)
from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.core.errors import InvariantBroken, ReplayDiverged, UsageError
from dora_pipe.ledger.database import Catalogue
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.lineage import first_record
from dora_pipe.producers.engines.engine import SamplingParams
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine, long_tailed_length
from dora_pipe.producers.tasks.calls import EnvStep, TaskEvent
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.trajectory import Trajectory
from tests.support import damage
from tests.support.batches import make_trajectory
from tests.support.branched_run import branch, branched
from tests.support.cluster import Cluster, make_config
from tests.support.contexts import served_agent
from tests.support.inline_tasks import InlineTasks, episode_tasks, failed
from tests.support.recorded_run import RecordedRun, audited
from tests.support.tamper import Tamper

MOVED = """
    select trajectory_id, incarnation
    from attempts join trajectories using (trajectory_id, attempt, incarnation)
    where resumed_tokens > 0 and attempts.outcome = 'logged'"""


def test_trajectories_are_told_apart_by_engine_and_mixed_ones_named(recorded: RecordedRun) -> None:
    with closing(recorded.open()) as bus, closing(read_catalogue(bus, recorded.topics)) as tables:
        names = pick(tables, 20, 5)
        assert engines_of(bus, recorded.topics, tables, names) == {"simulated": names}
        (name, incarnation), *_ = tables.query(MOVED)
        other = "update workers_ended set engine = 'another' where incarnation = ?"
        tables.query(other, [incarnation])
        with pytest.raises(UsageError, match="another, simulated"):
            engines_of(bus, recorded.topics, tables, [name])


def _params(config: Config) -> dict[str, SamplingParams]:
    return {
        "train": sampling_params(config.sampling, (END_TOKEN,)),
        "eval": sampling_params(config.eval_sampling(), (END_TOKEN,)),
    }


def _again(run: RecordedRun, expected: Sequence[str] | int) -> list[Regenerated]:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        names = pick(tables, expected, 3) if isinstance(expected, int) else expected
        engine = SimulatedEngine(slots=6, context_tokens=256, lengths=long_tailed_length)
        started = first_record(bus, run.topics)
        params = _params(logged_config(started.config))
        return list(regenerate(bus, run.topics, run.store, tables, engine, names, params))


def _tables(run: RecordedRun) -> Catalogue:
    with closing(run.open()) as bus:
        return read_catalogue(bus, run.topics)


def test_random_trajectories_come_out_bit_for_bit(recorded: RecordedRun) -> None:
    results = _again(recorded, 60)
    assert len(results) == 60
    assert [result for result in results if not result.equal] == []
    assert len({result.version for result in results}) > 5


def test_request_that_went_on_elsewhere_follows_its_prefill_points(recorded: RecordedRun) -> None:
    with closing(_tables(recorded)) as tables:
        moved = [name for name, _ in tables.query(MOVED)]
    assert moved, "the recorded run has requests that went on from a progress record"
    results = _again(recorded, moved)
    assert all(regenerated.equal and regenerated.prefills > 1 for regenerated in results), results


def test_choice_is_a_function_of_the_seed(recorded: RecordedRun) -> None:
    with closing(_tables(recorded)) as tables:
        assert pick(tables, 5, 1) == pick(tables, 5, 1)
        assert pick(tables, 5, 1) != pick(tables, 5, 2)
        assert tables.one("select count(*) from records where status = 'bound'") == (
            len(pick(tables, 10_000, 1)),
        )


def test_other_token_is_named_with_its_place(copy: RecordedRun, recorded: RecordedRun) -> None:
    with Tamper(copy) as log:
        name = damage.forge_everything(log)
    (result,) = _again(copy, [name])
    assert not result.equal
    with pytest.raises(ReplayDiverged, match=rf"{name}: token \d+ is \d+, recorded is \d+"):
        raise_if_different(result)


def test_other_logprob_is_named_with_its_place(copy: RecordedRun, recorded: RecordedRun) -> None:
    with Tamper(copy) as log:
        name = damage.forge_everything(log, damage.another_logprob)
    (result,) = _again(copy, [name])
    assert result.difference.startswith("logprobs[")
    assert result.difference.endswith("recorded is -0.125")


def test_unknown_trajectory_is_refused(recorded: RecordedRun) -> None:
    with pytest.raises(UsageError, match="has no record that counts"):
        _again(recorded, ["g0000009999-000"])


def test_environments_are_fed_back_as_recorded(tmp_path: Path) -> None:
    config = make_config(run__steps=2, run__name="turns", evaluation__prompts=0)
    with Cluster(tmp_path / "run", config, tasks=lambda: episode_tasks(3)) as cluster:
        cluster.run()
    run = RecordedRun(directory=tmp_path / "run", run="turns")
    results = _again(run, 20)
    assert [result for result in results if not result.equal] == []
    assert max(result.prefills for result in results) == 3


def test_episode_whose_environment_failed_ends_where_its_turn_did(tmp_path: Path) -> None:
    config = make_config(run__steps=1, run__name="broken", evaluation__prompts=0)
    with Cluster(tmp_path / "run", config, tasks=_broken_episodes) as cluster:
        cluster.run()
    run = RecordedRun(directory=tmp_path / "run", run="broken")
    with closing(_tables(run)) as tables:
        ended = "select trajectory_id from trajectories where finish = 'error' order by 1"
        names = [name for (name,) in tables.query(ended)]
    results = _again(run, names[:20])
    assert results
    assert [result for result in results if not result.equal] == []


def _broken_episodes() -> InlineTasks:
    tasks = episode_tasks(2)
    answer = tasks.step
    assert answer is not None

    def step(call: EnvStep) -> TaskEvent:
        if len(tasks.seen) % 5:
            return answer(call)
        return failed(call)

    tasks.step = step
    return tasks


def test_segments_follow_mask_and_prefill_points() -> None:
    turns = _segments([0, 0, 1, 1, 0, 1, 1, 1], prefills=(2, 5))
    assert turns == [(2, 4, True), (5, 8, True)]
    moved = _segments([0, 0, 1, 1, 1, 1], prefills=(2, 4))
    assert moved == [(2, 4, False), (4, 6, True)]
    twice_at_once = _segments([0, 0, 1, 1, 1, 1], prefills=(2, 2, 4))
    assert twice_at_once == moved


def test_prefill_points_that_leave_tokens_over_are_refused() -> None:
    with pytest.raises(InvariantBroken, match="do not lead to 4 sampled tokens"):
        _segments([0, 0, 1, 1, 1, 1], prefills=(3,))


def _segments(mask: list[int], prefills: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    trajectory = make_trajectory("g0000000001-000", sampled=(7,) * (len(mask) - 3))
    meta = msgspec.structs.replace(trajectory.meta, prefills=prefills)
    segments = prefill_segments(replace(trajectory, loss_mask=mask, meta=meta))
    return [(segment.start, segment.end, segment.whole) for segment in segments]


def _agent(log: Tamper, index: int = 40) -> str:
    engine = SimulatedEngine(slots=6, context_tokens=256, lengths=long_tailed_length)
    params = SamplingParams(max_tokens=40, stop_ids=(END_TOKEN,))
    return branch(log, index, lambda result: served_agent(result, engine, params))


def test_calls_of_an_agent_come_out_bit_for_bit_in_their_contexts(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        names = [_agent(log, index) for index in (20, 40)]
    results = _again(copy, names)
    assert [result.difference for result in results] == ["", ""]
    assert all(entry.prefills >= 6 for entry in results)


def test_the_audit_of_an_agents_trajectory_is_clean(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        _agent(log)
    messages = [violation.message for violation in audited(copy).violations]
    # What its step says that it has trained is of the trajectory that was there.
    assert messages == [
        "tokens in the contributions of step 2 does not follow from what was logged"
    ]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 5}, "does not follow from its prompt"),
        ({"occurrence": 3}, "does not follow from its prompt"),
        ({"answered_ns": 0}, "was answered before it was asked"),
    ],
)
def test_a_call_that_does_not_follow_from_its_prompt_is_named(
    copy: RecordedRun, change: dict[str, int], text: str
) -> None:
    def changed(trajectory: Trajectory) -> Trajectory:
        first, *rest = trajectory.meta.calls
        calls = (msgspec.structs.replace(first, **change), *rest)
        return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, calls=calls))

    with Tamper(copy) as log:
        name = branch(log, change=lambda result: changed(branched(result)))
    messages = [
        violation.message for violation in audited(copy).violations if violation.subject == name
    ]
    assert [text in message for message in messages if "contributions" not in message] == [True], (
        messages
    )


def test_a_seed_that_is_not_the_calls_is_no_other_trajectory_unseen(copy: RecordedRun) -> None:
    def changed(trajectory: Trajectory) -> Trajectory:
        calls = tuple(
            msgspec.structs.replace(call, seed=call.seed ^ 1) for call in trajectory.meta.calls
        )
        return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, calls=calls))

    engine = SimulatedEngine(slots=6, context_tokens=256, lengths=long_tailed_length)
    params = SamplingParams(max_tokens=40, stop_ids=(END_TOKEN,))
    with Tamper(copy) as log:
        name = branch(log, change=lambda result: changed(served_agent(result, engine, params)))
    (result,) = _again(copy, [name])
    assert result.difference.startswith("token ")
