"""Tests of colocated workers, which sleep during steps.

A batch uses free GPUs, sleeping workers get no requests, nothing is lost and no run stalls. Single
states are handwritten; worlds extend `test_world`.
"""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.waits import waits
from dora_pipe.schemas.rounds import NO_VERSION, AnyDecision, Assign, Migrate, TakeBatch
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

TWO: dict[str, Any] = {
    "run__steps": 5,
    "rollout__prompts_per_step": 4,
    "rollout__group_size": 1,
    "staleness__max_staleness": 2,
}


def beside(*, moves: bool = True) -> Stage:
    stage = Stage(**TWO).begin()
    stage.join("a", moves=moves)
    stage.join("e", moves=moves, colocated=True)
    stage.settle()
    assert (len(stage.running("a")), len(stage.running("e"))) == (4, 4)
    return stage


def finish_on(stage: Stage, worker: str, count: int) -> list[AnyDecision]:
    for name in stage.running(worker)[:count]:
        stage.finish(name)
    return stage.plan()


def sleeps(stage: Stage) -> list[AnyDecision]:
    for name in stage.running("e"):
        stage.tell(records.released(stage.placed[name], None, None))
    stage.tell(records.ready("e", stage.state.workers["e"].incarnation, NO_VERSION, ""))
    return stage.plan()


def assigned(decisions: list[AnyDecision], worker: str) -> list[int]:
    return [
        decision.version
        for decision in decisions
        if isinstance(decision, Assign) and decision.worker == worker
    ]


def test_a_batch_that_stands_ready_sends_the_colocated_worker_to_sleep_and_waits_for_it() -> None:
    stage = beside()
    assert assigned(finish_on(stage, "a", 3), "e") == []
    finish = finish_on(stage, "a", 1)
    assert assigned(finish, "e") == [NO_VERSION]
    assert "step 0 begins, and e shares its GPUs with the trainer" in next(
        decision.reason for decision in finish if isinstance(decision, Assign)
    )
    moves = [decision for decision in finish if isinstance(decision, Migrate)]
    assert [move.trajectory for move in moves] == stage.running("e")
    assert {(move.to, move.to_incarnation) for move in moves} == {("", -1)}
    assert not any(isinstance(decision, TakeBatch) for decision in finish)
    (wait,) = (wait for wait in waits(stage.state) if wait.name == "colocated")
    assert wait.words == "colocated workers to sleep, so that step 0 begins: e"
    assert stage.plan() == []
    finish = sleeps(stage)
    assert any(isinstance(decision, TakeBatch) for decision in finish)
    assert assigned(finish, "e") == []


def test_it_gets_nothing_in_a_step_and_the_newest_version_behind_it() -> None:
    stage = beside()
    finish_on(stage, "a", 4)
    sleeps(stage)
    assert stage.state.training is not None
    finish_on(stage, "a", 2)
    assert stage.state.workers["e"].target == NO_VERSION
    digest = stage.state.policies[0]
    wake = Assign(
        worker="e",
        incarnation=stage.state.workers["e"].incarnation,
        version=0,
        digest=digest,
        reason="x",
    )
    with pytest.raises(InvariantBroken, match="sleeps while a step is computed"):
        apply_decision(stage.state, wake)
    stage.commit()
    assert assigned(stage.plan(), "e") == [1]


def test_a_batch_or_a_sleep_against_the_rule_is_refused() -> None:
    stage = beside()

    def asleep(name: str) -> Assign:
        incarnation = stage.state.workers[name].incarnation
        return Assign(
            worker=name, incarnation=incarnation, version=NO_VERSION, digest="", reason="x"
        )

    with pytest.raises(InvariantBroken, match="e sleeps without a step to train"):
        apply_decision(stage.state, asleep("e"))
    with pytest.raises(InvariantBroken, match="a is not colocated"):
        apply_decision(stage.state, asleep("a"))
    stage.tell(records.joined("b", colocated=True, versions=3))
    assert "b is colocated but serves several versions" in stage.state.counters.rejection
