"""Tests of runs with partial rollouts: assignments, queues, kept requests."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.schemas.rounds import Assign, Schedule
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def stage_of(*, eval_rows: int = 4, **changes: Any) -> Stage:
    keys = {
        "rollout__prompts_per_step": 1,
        "rollout__group_size": 2,
        "staleness__partial_rollout": True,
        "staleness__async_batches": 3.0,
    }
    return Stage(**(keys | changes)).begin(eval_rows=eval_rows)


def targets(stage: Stage) -> dict[str, int]:
    return {name: entry.target for name, entry in sorted(stage.state.workers.items())}


def step(stage: Stage, group: str) -> list[Assign]:
    stage.finish_group(group)
    stage.settle()
    stage.commit()
    return [decision for decision in stage.plan() if isinstance(decision, Assign)]


def test_every_worker_is_assigned_the_newest_version_at_once_although_requests_run() -> None:
    stage = stage_of()
    for name in ("w0", "w1"):
        stage.worker(name, slots=2)
    busy = set(stage.running())
    assigned = step(stage, "g0000000000")
    assert [(decision.worker, decision.version) for decision in assigned] == [("w0", 1), ("w1", 1)]
    remaining_busy = {name for name in busy if not name.startswith("g0000000000")}
    assert remaining_busy <= set(stage.running()), "what runs stays where it is"
    assert any(
        "requests of" in decision.reason and "version 1" in decision.reason for decision in assigned
    )


def test_queued_requests_follow_to_the_newest_version_and_keep_stamp_and_deadline() -> None:
    stage = stage_of()
    stage.worker("w0", slots=3)
    before = {name: group.spec for name, group in stage.state.groups.items()}
    queued = [queue.trajectory for queue in stage.state.queues[0]]
    assert queued
    step(stage, "g0000000000")
    assert 0 not in stage.state.queues
    waiting = [entry.trajectory for queue in stage.state.queues.values() for entry in queue]
    assert set(queued) <= {*waiting, *stage.running()}
    stage.settle()
    for name, group in stage.state.groups.items():
        assert group.spec == before.get(name, group.spec)
    placed = [
        decision
        for decision in stage.decided
        if isinstance(decision, Schedule) and decision.spec.version == 0
    ]
    hosts = {stage.placed[name].worker for name in queued}
    assert hosts == {"w0"}
    assert targets(stage) == {"w0": 1}
    assert placed[-1].spec.deadline == before[placed[-1].spec.group].deadline


def test_request_of_a_lost_worker_goes_on_under_the_newest_version() -> None:
    stage = stage_of()
    stage.worker("w0", slots=4)
    stage.worker("w1", slots=4)
    step(stage, "g0000000000")
    stage.settle()
    (name, *_) = [
        process for process in stage.running("w0") if process < "g0000000003"
    ] or stage.running("w0")
    stage.lose("w0")
    stage.settle()
    assert stage.placed[name].worker == "w1"
    assert stage.placed[name].attempt == 2
    assert targets(stage) == {"w1": 1}


def test_worker_with_an_evaluation_keeps_its_version_until_that_has_ended() -> None:
    stage = stage_of(evaluation__prompts=1, evaluation__every=1)
    stage.worker("w0", slots=8)
    stage.worker("w1", slots=8)
    (evaluation,) = [name for name in stage.running() if name.startswith("e")]
    host = stage.placed[evaluation].worker
    (other,) = {"w0", "w1"} - {host}
    assigned = step(stage, "g0000000000")
    assert [decision.worker for decision in assigned] == [other]
    stage.settle()
    assert targets(stage) == {host: 0, other: 1}
    stage.finish(evaluation)
    assert [decision.worker for decision in stage.plan() if isinstance(decision, Assign)] == [host]


def test_busy_worker_may_not_go_back_to_an_older_version() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6)
    step(stage, "g0000000000")
    stage.load()
    worker = stage.state.workers["w0"]
    assert worker.requests
    back = Assign(
        worker="w0", incarnation=worker.incarnation, version=0, digest=records.weights(0), reason=""
    )
    with pytest.raises(InvariantBroken, match="has open requests"):
        apply_decision(stage.state, back)


def test_run_that_does_not_mix_versions_leaves_busy_workers_alone() -> None:
    stage = stage_of(staleness__partial_rollout=False)
    stage.worker("w0", slots=6)
    assert step(stage, "g0000000000") == []
    worker = stage.state.workers["w0"]
    forward = Assign(
        worker="w0", incarnation=worker.incarnation, version=1, digest=records.weights(1), reason=""
    )
    with pytest.raises(InvariantBroken, match="has open requests"):
        apply_decision(stage.state, forward)
