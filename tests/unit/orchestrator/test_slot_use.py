"""Tests of slots left empty only by the in-flight limit."""

from __future__ import annotations

from typing import Any

from dora_pipe.orchestrator.fold import capped
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage


def stage_of(**changes: Any) -> Stage:
    small = {
        "rollout__prompts_per_step": 2,
        "rollout__group_size": 2,
        "staleness__max_staleness": 2,
    }
    stage = Stage(**{**small, **changes}).begin()
    stage.worker("w0", slots=16)
    return stage


def test_the_limit_leaves_slots_empty_that_the_bound_would_fill() -> None:
    assert capped(stage_of(staleness__async_batches=2.0).state) == (8, 16)


def test_at_the_largest_limit_the_bound_leaves_them_empty() -> None:
    assert capped(stage_of(staleness__async_batches=3.0).state) == (0, 16)


def test_at_the_end_of_a_run_and_in_a_pause_no_limit_is_the_cause() -> None:
    assert capped(stage_of(run__steps=1).state) == (0, 16)
    stage = stage_of(staleness__async_batches=2.0)
    stage.tell(records.command("pause"))
    assert capped(stage.state) == (0, 16)
