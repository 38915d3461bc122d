"""Tests of redundant trajectories and group timeouts."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import End, EndSamples, GroupExpired, ScoreGroup
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

G0 = "g0000000000"


def stage_of(*, slots: int = 8, together: tuple[str, ...] = (), **changes: Any) -> Stage:
    keys = {
        "rollout__group_redundancy": 1,
        "rollout__prompts_per_step": 1,
        "staleness__max_staleness": 0,
    }
    stage = Stage(**{**keys, **changes}).begin(together=together)
    stage.worker("w0", slots=slots)
    return stage


def name(sample: int) -> str:
    return trajectory_id(G0, sample)


def ends(stage: Stage) -> list[EndSamples]:
    return [samples for samples in stage.decided if isinstance(samples, EndSamples)]


def taken(stage: Stage) -> list[str]:
    assert stage.batch is not None
    return [
        trajectory.trajectory for group in stage.batch.groups for trajectory in group.trajectories
    ]


def expire(stage: Stage, group: str = G0) -> None:
    apply_observation(stage.state, GroupExpired(group=group))


def test_a_group_is_dispatched_with_its_spare_samples_and_an_evaluation_without() -> None:
    stage = stage_of(evaluation__prompts=1)
    group, evaluation = stage.state.groups[G0], stage.state.groups["e0000000000"]
    assert (group.spec.size, group.spec.redundancy, group.spec.samples) == (2, 1, 3)
    assert [process for process in stage.running() if process.startswith(G0)] == [
        name(0),
        name(1),
        name(2),
    ]
    assert (evaluation.spec.size, evaluation.spec.redundancy) == (1, 0)


def test_those_that_count_are_scored_together() -> None:
    stage = stage_of(together=("train",))
    stage.finish(name(0))
    stage.finish(name(2))
    stage.finish(name(1))
    stage.settle()
    (question,) = [group for group in stage.decided if isinstance(group, ScoreGroup)]
    assert [trajectory.trajectory for trajectory in question.trajectories] == [name(0), name(2)]
    assert question.reason == "2 trajectories count; w0 scores them together"
    stage.tell(records.scored(question, (1.5, 0.5)))
    stage.plan()
    assert taken(stage) == [name(0), name(2)]
    assert stage.batch is not None
    assert stage.batch.groups[0].rewards == {name(0): 1.5, name(2): 0.5}


def test_a_group_whose_time_is_over_fails_with_too_few() -> None:
    stage = stage_of(rollout__group_size=3, rollout__group_timeout_s=60.0)
    stage.finish(name(0))
    expire(stage)
    stage.plan()
    (ended,) = [decision for decision in stage.decided if isinstance(decision, End)]
    assert (ended.outcome, ended.reason) == (
        "failed",
        "1 of 3 trajectories were valid when its time was over",
    )
    assert [(end.samples, end.outcome) for end in ends(stage)] == [((1, 2, 3), "expired")]
    (failed,) = stage.state.failures.failed
    assert "rollout.group_timeout_s" in failed.error


def test_an_evaluation_whose_time_is_over_has_the_figure_of_what_is_there() -> None:
    stage = stage_of(evaluation__prompts=1, evaluation__group_size=2, rollout__group_timeout_s=60.0)
    stage.finish("e0000000000-000", reward=0.5)
    expire(stage, "e0000000000")
    stage.plan()
    (ended,) = [decision for decision in stage.decided if isinstance(decision, End)]
    assert (ended.outcome, ended.reason) == ("evaluated", "mean reward 0.5000 over 1 of 2")


Event = tuple[int, float | None]


@given(
    size=st.integers(1, 4),
    spare=st.integers(0, 3),
    least=st.integers(1, 4),
    events=st.lists(st.tuples(st.integers(0, 6), st.sampled_from([0.0, 1.0, None])), max_size=7),
    over_at=st.none() | st.integers(0, 7),
)
def test_whatever_the_order_the_first_valid_ones_count_and_all_others_have_an_outcome(
    size: int, spare: int, least: int, events: list[Event], over_at: int | None
) -> None:
    least = min(least, size)
    stage = stage_of(
        rollout__group_size=size,
        rollout__group_redundancy=spare,
        rollout__min_valid_trajectories=least,
        slots=8,
    )
    order: dict[int, float | None] = {}
    for sample, reward in events:
        if sample < size + spare:
            order.setdefault(sample, reward)
    accepted: dict[int, float | None] = {}
    closed = False
    for index, (sample, reward) in enumerate(order.items()):
        if over_at == index and not closed:
            expire(stage)
            closed = True
        stage.finish(name(sample), reward=reward)
        if not closed:
            accepted[sample] = reward
            valid = sum(entry is not None for entry in accepted.values())
            invalid = len(accepted) - valid
            failed = size + spare - invalid < least
            closed = valid >= size or failed or len(accepted) == size + spare
    stage.plan()
    group = stage.state.groups.get(G0)
    ended = {
        decision.group: decision for decision in stage.decided if isinstance(decision, End)
    }.get(G0)
    counted = sum(entry is not None for entry in accepted.values())
    if not closed:
        assert group is not None and group.phase == "generating"
    elif counted < least:
        assert ended is not None and ended.outcome == "failed"
    else:
        assert taken(stage) == [name(sample) for sample in sorted(accepted)]
        indices = tuple(index for index in range(size + spare) if index not in accepted)
        results = [end for end in ends(stage) if end.group == G0]
        assert [result.samples for result in results] == ([indices] if indices else [])
    if closed:
        assert not [request for request in stage.state.requests if request.startswith(G0)]
