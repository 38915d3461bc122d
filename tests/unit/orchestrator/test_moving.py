"""Tests of migrations: which requests, when, where, and how often."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.fold import apply_observation
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import AnyDecision, Assign, KvPressure, Migrate, PlanPeriod
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage
from tests.support.singly import placed as placed_by

MANY: dict[str, Any] = {
    "run__steps": 50,
    "rollout__prompts_per_step": 1,
    "rollout__group_size": 1,
    "staleness__max_staleness": 20,
    "staleness__async_batches": 21.0,
}


def moves_of(decisions: list[AnyDecision]) -> list[Migrate]:
    return [decision for decision in decisions if isinstance(decision, Migrate)]


def two_half_empty(*, moves: bool = True, slots: int = 4, age_s: float = 100.0) -> Stage:
    stage = Stage(**MANY).begin()
    stage.join("a", slots=slots, moves=moves)
    stage.join("b", slots=slots, moves=moves)
    stage.settle()
    stage.tell(records.command("pause"))
    for name in [*stage.running("a")[3:], *stage.running("b")[2:]]:
        stage.finish(name)
    stage.plan()
    stage.later(age_s)
    stage.tell(records.command("resume"))
    stage.commit()
    assert (len(stage.running("a")), len(stage.running("b"))) == (3, 2)
    return stage


def test_emptiest_worker_of_an_old_version_is_emptied_into_the_others() -> None:
    stage = two_half_empty(slots=5)
    moves = moves_of(stage.plan())
    assert [(decision.worker, decision.to) for decision in moves] == [("b", "a"), ("b", "a")]
    assert [move.trajectory for move in moves] == stage.running("b")
    assert "frees b for version 1" in moves[0].reason
    assert "2 requests of version 0 fit elsewhere" in moves[0].reason


def test_it_waits_for_the_release_then_goes_on_there_and_the_worker_is_assigned() -> None:
    stage = two_half_empty(slots=5)
    moving = [move.trajectory for move in moves_of(stage.plan())]
    resume = Resume(tokens=40, partition=0, offset=3)
    kv = Blob(sha256="e" * 64, bytes=100)
    for name in moving:
        assert stage.state.workers["a"].arriving + len(stage.running("a")) == 5
        stage.tell(records.released(stage.placed[name], resume, kv))
        (request,) = placed_by(stage.plan())
        assert (request.trajectory, request.worker, request.attempt) == (name, "a", 2)
        assert (request.resume, request.kv) == (resume, kv)
    assigned = [decision for decision in stage.decided if isinstance(decision, Assign)][-1]
    assert (assigned.worker, assigned.version) == ("b", 1)
    assert "b has run out of version 0" in assigned.reason
    assert stage.state.workers["a"].arriving == 0


def test_nothing_moves_when_the_workers_cannot_let_go() -> None:
    assert moves_of(two_half_empty(moves=False, slots=5).plan()) == []


def test_nothing_moves_that_would_soon_be_over() -> None:
    assert moves_of(two_half_empty(slots=5, age_s=0.1).plan()) == []


def test_request_that_moves_is_not_moved_again_until_it_has_rested_and_boundedly_often() -> None:
    stage = two_half_empty(slots=5)
    request = stage.state.requests[stage.running("b")[0]]
    request.moves, request.moved_ns = 1, stage.state.now_ns
    assert moves_of(stage.plan()) == []
    stage.later(60)
    request.moves = 3
    apply_observation(stage.state, PlanPeriod())
    assert moves_of(stage.plan()) == [], "three moves are all it has"
    request.moves = 2
    apply_observation(stage.state, PlanPeriod())
    assert len(moves_of(stage.plan())) == 2


def pressed(stage: Stage, name: str, used: int) -> list[AnyDecision]:
    incarnation = stage.state.workers[name].incarnation
    apply_observation(
        stage.state, KvPressure(worker=name, incarnation=incarnation, used_tokens=used)
    )
    return stage.plan()


def test_newest_requests_leave_a_worker_whose_cache_is_too_full() -> None:
    stage = Stage(**MANY).begin()
    stage.join("a", slots=5, moves=True)
    stage.join("b", slots=22, moves=True)
    stage.settle()
    for number, name in enumerate(stage.running("a")):
        stage.state.requests[name].began_ns = number
    moves = moves_of(pressed(stage, "a", 1000))
    assert [move.trajectory for move in moves] == [stage.running("a")[-1]]
    assert moves[0].to == "b" and "holds 1000 of 1024 tokens" in moves[0].reason
    assert moves_of(pressed(stage, "a", 1010)) == [], "one is on its way"


def test_version_without_a_host_gets_a_worker_that_is_emptied_for_it() -> None:
    stage = Stage(**MANY).begin()
    stage.join("old", slots=2, moves=True)
    stage.settle()
    stage.finish(stage.running("old")[0])
    stage.settle()
    stage.commit()
    for name in ("a", "b"):
        stage.join(name, slots=9, moves=True)
    stage.settle()
    stage.tell(records.command("pause"))
    for name in [*stage.running("a")[:6], *stage.running("b")[:5]]:
        stage.finish(name)
    stage.plan()
    stage.lose("old")
    stage.tell(records.command("resume"))
    moves = moves_of(stage.plan())
    assert {(decision.worker, decision.to) for decision in moves} == {("a", "b")}
    assert "version 0 has no host" in moves[0].reason
    for move in moves:
        stage.release(move.trajectory)
    assigned = [decision for decision in stage.plan() if isinstance(decision, Assign)]
    assert [(decision.worker, decision.version) for decision in assigned] == [("a", 0)]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"attempt": 7}, "not placed on that worker"),
        ({"to": "b"}, "is already on b"),
        ({"to_incarnation": 99}, "is not there"),
        ({"trajectory": "g0000000099-000"}, "is not open"),
    ],
)
def test_move_that_cannot_be_is_refused_and_changes_nothing(
    changes: dict[str, Any], why: str
) -> None:
    stage = two_half_empty(slots=5)
    before = stage.copy()
    (first, _) = moves_of(stage.plan())
    changed = msgspec.structs.replace(first, **changes)
    if "to" in changes:
        changed = msgspec.structs.replace(changed, to_incarnation=first.incarnation)
    digest = before.digest()
    with pytest.raises(InvariantBroken, match=why):
        apply_decision(before, changed)
    assert before.digest() == digest
    with pytest.raises(InvariantBroken, match="is already moving"):
        apply_decision(stage.state, first)
