"""Tests of which records, attempts and commits count for a group."""

from __future__ import annotations

import pytest

from dora_pipe.ledger.account import GONE_KEPT, GroupEnded, StepEnded
from dora_pipe.ledger.history import RecordLogged
from dora_pipe.schemas.control import AnyControl, BatchRefused
from dora_pipe.schemas.rounds import Dispatch, End, Fence, StopRun
from tests.support.account_stage import (
    FIRST,
    GROUP,
    SECOND,
    W0,
    W1,
    AccountStage,
    at,
    began,
    commit,
    logged,
    place,
    spec,
    take,
    whole,
)
from tests.support.orchestrator_records import command, joined, refused


def _running() -> AccountStage:
    return began().decide(100, Dispatch(reason="room", spec=spec()), place("w0", W0, 0, 1))


def _outcomes(stage: AccountStage, trajectory: str = FIRST) -> list[str]:
    requests = stage.account.open[GROUP].requests
    return [attempt.outcome for attempt in requests[trajectory].attempts]


def test_trained_group_and_its_step_end_together() -> None:
    group, step = whole().ended
    assert isinstance(group, GroupEnded)
    assert isinstance(step, StepEnded)
    assert (group.outcome, group.step, group.ended_ns) == ("trained", 4, at(1000))
    assert [result.trajectory for result in group.group.results] == [FIRST, SECOND]
    assert group.group.last is not None
    assert group.group.last.trajectory == SECOND
    assert step.groups == (group.group,)
    assert step.batch.free_ns == at(1)


def test_nothing_open_is_held_after_its_end() -> None:
    assert whole().account.open == {}


def test_run_is_over_when_a_round_says_so() -> None:
    stage = whole()
    assert not stage.account.over
    assert stage.decide(1100, StopRun(reason="all steps")).account.over


def test_worker_that_joins_again_has_lost_what_it_had() -> None:
    fact = _running().fact(joined("w0"))
    assert _outcomes(fact) == ["fenced"]
    fact.decide(160, place("w0", 4, 0, attempt=2)).fact(logged(200, "w0", 4, FIRST, attempt=2))
    assert _outcomes(fact) == ["fenced", "logged"]


def _finished() -> AccountStage:
    fact = _running().fact(logged(200, "w0", W0, FIRST))
    return fact.fact(logged(210, "w0", W0, SECOND, offset=10)).decide(250, take())


@pytest.mark.parametrize(
    "revoked", [refused(4, [GROUP]), command("fail-batch")], ids=["refused", "fail-batch"]
)
def test_commit_of_a_batch_that_was_ended_does_not_count(revoked: AnyControl) -> None:
    fact = _finished().fact(revoked).fact(commit(300))
    assert fact.ended == []
    fact.decide(310, End(reason="non-finite", group=GROUP, outcome="failed"))
    (ended,) = fact.ended
    assert isinstance(ended, GroupEnded)
    assert (ended.outcome, ended.step, ended.batch) == ("failed", None, None)


def test_refusal_of_a_fenced_trainer_changes_nothing() -> None:
    old: BatchRefused = refused(4, [GROUP], incarnation=-2)
    assert len(_finished().fact(old).fact(commit(300)).ended) == 2


def test_batch_that_is_taken_again_counts_as_its_last_attempt() -> None:
    stage = _finished().fact(refused(4, ["g0000000001"])).decide(270, take(attempt=2))
    stage.fact(commit(280, attempt=1))
    assert stage.ended == []
    group = stage.fact(commit(300, attempt=2)).ended[0]
    assert isinstance(group, GroupEnded)
    assert group.batch is not None
    assert (group.batch.take.attempt, group.batch.taken_ns) == (2, at(270))


def test_open_group_is_told_as_it_is() -> None:
    stage = _finished()
    now = stage.account.now(GROUP, at(260))
    assert now is not None
    assert (now.outcome, now.step) == ("open", 4)
    assert stage.account.now("g0000000099", at(260)) is None


def test_memory_holds_what_is_open_alone() -> None:
    fact = _finished().fact(commit(300))
    assert fact.account.open == {}
    fenced = Fence(reason="silent", worker="w0", incarnation=W0)
    fact.decide(310, fenced).fact(logged(320, "w0", W0, FIRST, offset=11))
    event = fact.events[-1]
    assert isinstance(event, RecordLogged)
    assert event.status == "fenced"
    for again in range(2 * GONE_KEPT):
        incarnation = 1000 + again
        fact.account.fact(incarnation, joined("w9"))
        fact.fact(logged(400, "w9", incarnation, FIRST, offset=incarnation))
    assert set(fact.account.workers) == {W1, incarnation}
    groups = fact.account._groups
    assert len(groups.workers) == GONE_KEPT + 2
    assert not groups.groups and not groups.logged
