"""Tests of workers that host several versions."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.schemas.rounds import Assign, Migrate
from tests.support.orchestrator_stage import Stage


def stage_of(**changes: Any) -> Stage:
    keys = {
        "rollout__prompts_per_step": 1,
        "rollout__group_size": 2,
        "staleness__max_staleness": 2,
        "staleness__async_batches": 3.0,
        "run__steps": 9,
    }
    return Stage(**(keys | changes)).begin(rows=30)


def resident_versions(stage: Stage, name: str = "w0") -> list[int]:
    return stage.state.residents[name].held


def step(stage: Stage, group: str) -> list[Assign]:
    stage.finish_group(group)
    stage.settle()
    stage.commit()
    return [decision for decision in stage.plan() if isinstance(decision, Assign)]


def test_every_worker_takes_the_newest_version_at_once_and_requests_keep_theirs() -> None:
    stage = stage_of()
    stage.worker("w0", slots=3, versions=3)
    stage.worker("w1", slots=3, versions=3)
    busy = [name for name in stage.running() if not name.startswith("g0000000000")]
    assigned = step(stage, "g0000000000")
    assert [(decision.worker, decision.version, decision.drop) for decision in assigned] == [
        ("w0", 1, ()),
        ("w1", 1, ()),
    ]
    assert all("keep theirs" in decision.reason for decision in assigned)
    stage.settle()
    assert resident_versions(stage) == [0, 1]
    assert set(busy) <= set(stage.running()), "nothing was moved or handed back"
    assert {stage.placed[name].spec.version for name in stage.running()} == {0, 1}
    assert not [decision for decision in stage.decided if isinstance(decision, Migrate)]


def test_version_without_open_groups_is_dropped_with_the_next_assignment() -> None:
    stage = stage_of(staleness__max_staleness=1, staleness__async_batches=1.0)
    stage.worker("w0", slots=4, versions=4)
    for number in range(3):
        assigned = step(stage, f"g{number:010d}")
        assert [decision.drop for decision in assigned] == [(number,)]
        stage.settle()
        assert resident_versions(stage) == [number + 1]


def test_worker_without_room_keeps_what_it_needs_and_takes_the_newest_when_that_has_ended() -> None:
    stage = stage_of(staleness__async_batches=3.0)
    stage.worker("w0", slots=6, versions=2)
    kept = [name for name in stage.running() if name.startswith("g0000000002")]
    step(stage, "g0000000000")
    stage.settle()
    step(stage, "g0000000001")
    stage.settle()
    # g2 has version 0, g3 version 1; version 2 exists.
    assert resident_versions(stage) == [0, 1]
    assert stage.state.version == 2
    assert stage.state.workers["w0"].target == 1
    assert kept and set(kept) <= set(stage.running())
    stage.finish_group("g0000000002")
    assigned = [decision for decision in stage.plan() if isinstance(decision, Assign)]
    assert [(decision.version, decision.drop) for decision in assigned] == [(2, (0,))]
    stage.settle()
    assert resident_versions(stage) == [1, 2]


def test_decisions_that_no_plan_contains_are_refused() -> None:
    stage = stage_of()
    stage.worker("w0", slots=6, versions=2)
    assigned = step(stage, "g0000000000")
    before = stage_of()
    before.worker("w0", slots=6, versions=2)
    before.finish_group("g0000000000")
    before.settle()
    before.commit()
    (full,) = assigned
    needed = msgspec.structs.replace(full, drop=(0,))
    with pytest.raises(InvariantBroken, match="has requests of what it is to drop"):
        apply_decision(before.state, needed)
    absent = msgspec.structs.replace(full, drop=(7,))
    with pytest.raises(InvariantBroken, match="does not have what it is to drop"):
        apply_decision(before.state, absent)
    before.state.residents["w0"].most = 1
    with pytest.raises(InvariantBroken, match="no room"):
        apply_decision(before.state, full)


def test_worker_that_claims_too_many_versions_is_not_believed() -> None:
    stage = stage_of()
    stage.join("w0", versions=5000)
    stage.join("w1", versions=0)
    assert stage.state.workers == {}
    assert stage.state.counters.rejected == 2
