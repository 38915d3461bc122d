"""Tests of groups scored together."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.planner import decide
from dora_pipe.schemas.rounds import End, ScoreGroup
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

G0 = "g0000000000"


def stage_of(*workers: str, **changes: object) -> Stage:
    stage = Stage(**changes).begin(together=("train", "eval"))
    for name in workers or ("w0",):
        stage.worker(name)
    return stage


def last_question(stage: Stage, group: str = G0) -> ScoreGroup:
    decided = (group for group in reversed(stage.decided) if isinstance(group, ScoreGroup))
    return next(decision for decision in decided if decision.spec.group == group)


def complete(stage: Stage, group: str = G0, *rewards: float | None) -> ScoreGroup:
    for sample, reward in enumerate(rewards or (1.0, 1.0)):
        stage.finish(f"{group}-{sample:03}", reward=reward)
    stage.settle()
    return last_question(stage, group)


def ended(stage: Stage, group: str = G0) -> End:
    decided = (decision for decision in stage.decided if isinstance(decision, End))
    return next(decision for decision in decided if decision.group == group)


def test_a_group_is_asked_about_when_its_last_sample_has_ended_and_holds_no_slot() -> None:
    stage = stage_of()
    stage.finish(f"{G0}-000")
    stage.settle()
    assert not stage.state.scoring
    stage.finish(f"{G0}-001")
    stage.settle()
    question = last_question(stage)
    group = stage.state.groups[G0]
    assert (group.phase, question.attempt, question.worker) == ("scoring", 1, "w0")
    assert [trajectory.trajectory for trajectory in question.trajectories] == [
        f"{G0}-000",
        f"{G0}-001",
    ]
    assert not [name for name in stage.state.workers["w0"].requests if name.startswith(G0)]
    assert decide(stage.state) == []


@pytest.mark.parametrize(
    ("rewards", "outcome"), [((0.5, 0.5), "filtered"), ((0.5, 1.0), None)], ids=["equal", "unequal"]
)
def test_whether_it_is_filtered_is_asked_of_the_scores_not_of_the_records(
    rewards: tuple[float, ...], outcome: str | None
) -> None:
    stage = stage_of(rollout__filter_zero_advantage=True)
    stage.tell(records.scored(complete(stage), rewards))
    stage.settle()
    outcomes = [
        decision.outcome
        for decision in stage.decided
        if isinstance(decision, End) and decision.group == G0
    ]
    assert outcomes == ([outcome] if outcome else [])


def test_an_attempt_that_may_be_asked_again_is_boundedly_often_and_then_the_group_fails() -> None:
    stage = stage_of(rollout__max_attempts=3)
    question = complete(stage)
    for attempt in (1, 2, 3):
        assert question.attempt == attempt
        stage.tell(records.scored(question, error="Retry: busy", retryable=True))
        stage.settle()
        question = last_question(stage)
    assert question.attempt == 3
    assert ended(stage).outcome == "failed"
    assert G0 not in stage.state.scoring


def test_an_answer_about_other_samples_or_without_bounds_is_rejected() -> None:
    stage = stage_of()
    question = complete(stage)
    answer = records.scored(question, (1.0, float("1e9")))
    stage.tell(answer)
    assert "beyond" in stage.state.counters.rejection
    answer = records.scored(question, (1.0, 1.0))
    stage.tell(msgspec.structs.replace(answer, samples=answer.samples[:1]))
    assert "other trajectories" in stage.state.counters.rejection
    assert stage.state.groups[G0].phase == "scoring"


def test_a_group_is_not_asked_about_again_nor_otherwise() -> None:
    stage = stage_of("w0", "w1")
    question = complete(stage)
    with pytest.raises(InvariantBroken, match="is not waiting for its score"):
        apply_decision(stage.state, question)
    stage.tell(records.scored(question, error="Retry: busy", retryable=True))
    with pytest.raises(InvariantBroken, match="not the next attempt"):
        apply_decision(stage.state, question)
