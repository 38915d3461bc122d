"""Tests of plans: decisions, order, completeness."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.schemas.identity import group_seed, partition_of, prompt_index
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    End,
    Schedule,
    TakeBatch,
)
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage, unchanged
from tests.support.singly import placed as placed_by


def kinds(decisions: list[AnyDecision]) -> list[str]:
    names = [type(decision).__name__ for decision in decisions]
    return [name for index, name in enumerate(names) if not index or names[index - 1] != name]


def specs(stage: Stage, purpose: str = "train") -> list[Any]:
    specs = [decision.spec for decision in stage.decided if isinstance(decision, Dispatch)]
    return [spec for spec in specs if spec.purpose == purpose]


def test_a_dispatch_stamps_version_deadline_prompt_seed_and_partition() -> None:
    stage = Stage(staleness__max_staleness=3, bus__partitions=3).begin(rows=7)
    stage.worker("w0", slots=4)
    for ordinal, spec in enumerate(specs(stage)):
        data_epoch, index = prompt_index(7, ordinal, 7)
        assert (spec.ordinal, spec.index, spec.data_epoch) == (ordinal, index, data_epoch)
        assert (spec.version, spec.deadline) == (0, 3)
        assert spec.digest == records.weights(0)
        assert spec.partition == partition_of(ordinal, 3)
        assert spec.seed == group_seed(7, "train", ordinal)
        assert spec.size == 2


def test_a_group_is_admitted_for_one_free_slot_and_its_samples_queue() -> None:
    stage = Stage(rollout__group_size=4).begin()
    stage.worker("w0", slots=1)
    assert len(specs(stage)) == 1
    assert len(stage.state.queues[0]) == 3
    stage.finish("g0000000000-000")
    placed = [request.trajectory for request in placed_by(stage.plan())]
    assert placed == ["g0000000000-001"], "queued trajectories go before new groups"
    assert len(specs(stage)) == 1


def test_group_without_advantage_is_filtered_and_replaced_with_the_newest_stamp() -> None:
    stage = Stage(
        rollout__prompts_per_step=1, rollout__filter_zero_advantage=True, run__steps=1
    ).begin()
    stage.worker("w0", slots=2)
    stage.finish("g0000000000-000")
    stage.finish("g0000000000-001")
    decisions = stage.plan()
    assert kinds(decisions) == ["End", "Dispatch", "Schedule"]
    assert isinstance(decisions[0], End)
    assert (decisions[0].outcome, "no advantage" in decisions[0].reason) == ("filtered", True)
    assert [spec.ordinal for spec in specs(stage)] == [0, 1]


def test_group_without_enough_valid_samples_fails_and_the_running_ones_are_cancelled() -> None:
    stage = Stage(
        rollout__prompts_per_step=1, rollout__group_size=4, rollout__min_valid_trajectories=3
    ).begin()
    stage.worker("w0", slots=3)
    stage.finish("g0000000000-000", reward=None)
    assert kinds(stage.plan()) == ["Schedule"], "three of four may still be valid"
    stage.finish("g0000000000-001", reward=None)
    decisions = stage.plan()
    assert kinds(decisions)[:2] == ["Cancel", "End"]
    cancelled = [decision.trajectory for decision in decisions if isinstance(decision, Cancel)]
    assert cancelled == ["g0000000000-002", "g0000000000-003"]
    late = records.logged(stage.placed["g0000000000-002"])
    before = stage.copy()
    stage.tell(late)
    assert unchanged(before, stage.state)


def test_evaluation_of_a_version_queues_behind_its_training_groups_and_ends_evaluated() -> None:
    stage = Stage(
        run__steps=2,
        rollout__prompts_per_step=1,
        rollout__group_size=2,
        staleness__max_staleness=0,
        evaluation__prompts=3,
    ).begin(eval_rows=2)
    stage.join("w0", slots=2)
    assert kinds(stage.plan()) == ["Dispatch", "Assign"]
    actual_specs = specs(stage, "eval")
    assert [(spec.index, spec.deadline, spec.size) for spec in actual_specs] == [
        (0, -1, 1),
        (1, -1, 1),
    ]
    assert [spec.seed for spec in actual_specs] == [group_seed(7, "eval", row) for row in (0, 1)]
    assert stage.state.deadlines == {}, "outside U"
    stage.load()
    stage.plan()
    assert stage.running() == ["e0000000000-000", "e0000000001-000"]
    stage.finish_all()
    assert stage.state.counters.outcomes == {"evaluated": 2}
    stage.commit()
    stage.settle()
    assert len(specs(stage, "eval")) == 2, "version 1 is neither first nor last"
    stage.finish_all()
    stage.commit()
    assert not stage.state.done
    stage.settle()
    assert [spec.version for spec in specs(stage, "eval")] == [0, 0, 2, 2]
    assert [spec.ordinal for spec in specs(stage, "eval")] == [0, 1, 2, 3]
    assert specs(stage, "eval")[2].seed == actual_specs[0].seed, "every evaluation draws the same"
    stage.finish_all()
    assert stage.state.done
    assert stage.state.counters.outcomes == {"evaluated": 4, "trained": 2}


def test_long_plan_is_cut_and_goes_on_in_the_next_round() -> None:
    full = Stage(rollout__prompts_per_step=20, rollout__group_size=3).begin()
    full.worker("w0", slots=100)
    cut = Stage(rollout__prompts_per_step=20, rollout__group_size=3).begin()
    cut.join("w0", slots=100)
    cut.plan(limit=7)
    cut.load()
    parts = []
    while part := cut.plan(limit=7):
        parts.append(part)
    assert all(len(part) <= 7 + 3 for part in parts)
    assert len(parts) > 10
    assert [*chain(*parts)] == [
        decision for decision in full.decided if not isinstance(decision, Assign)
    ]
    assert cut.state.digest() == full.state.digest()


@pytest.mark.parametrize("kind", [Dispatch, Schedule, Assign, TakeBatch, End])
def test_no_decision_is_legal_twice(kind: type[Any]) -> None:
    stage = Stage(rollout__prompts_per_step=1, rollout__filter_zero_advantage=True).begin()
    stage.worker("w0", slots=4)
    stage.finish("g0000000000-000", reward=0.0)
    stage.finish("g0000000000-001")
    stage.finish("g0000000001-000")
    stage.finish("g0000000001-001")
    stage.plan()
    decision = next(decision for decision in stage.decided if isinstance(decision, kind))
    before = stage.state.digest()
    with pytest.raises(InvariantBroken):
        apply_decision(stage.state, decision)
    assert stage.state.digest() == before
