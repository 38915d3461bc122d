"""Why slots are empty: each cause from the state that has it."""

from __future__ import annotations

from typing import Any

from dora_pipe.orchestrator.slot_use import slot_use, why_nothing_new
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

SMALL = {"groups__per_step": 2, "groups__size": 2}
"""A batch is four requests."""


def stage_of(**changes: Any) -> Stage:
    stage = Stage(**{**SMALL, "staleness__max_staleness": 2, **changes}).begin()
    stage.worker("w0", slots=16)
    return stage


def test_slots_are_busy_with_what_was_placed_and_the_cap_leaves_the_rest_empty() -> None:
    stage = stage_of(staleness__in_flight_batches=2.0)
    assert slot_use(stage.state) == {"busy": 8, "in-flight": 8}


def test_at_the_largest_cap_it_is_the_bound_that_leaves_slots_empty() -> None:
    stage = stage_of(staleness__in_flight_batches=3.0)
    assert slot_use(stage.state) == {"busy": 12, "bound": 4}


def test_at_the_end_of_a_run_no_step_is_left_for_more() -> None:
    stage = stage_of(run__steps=1)
    assert slot_use(stage.state) == {"busy": 4, "steps": 12}


def test_worker_with_requests_of_an_older_version_gets_nothing_new() -> None:
    stage = stage_of(staleness__in_flight_batches=2.0)
    for group in ("g0000000000", "g0000000001"):
        stage.finish_group(group)
    stage.settle()
    stage.commit()
    stage.settle()
    assert slot_use(stage.state) == {"busy": 4, "older": 12}


def test_idle_worker_of_an_older_version_is_no_reason_by_itself() -> None:
    stage = stage_of(staleness__in_flight_batches=2.0)
    stage.finish_all()
    stage.settle()
    assert slot_use(stage.state) == {"busy": 0, "in-flight": 16}
    stage.commit()
    assert stage.state.workers["w0"].target < stage.state.version
    assert why_nothing_new(stage.state) == "placing", "a round that assigns it comes next"


def test_worker_that_was_assigned_a_version_loads_it() -> None:
    stage = Stage(**SMALL).begin()
    stage.join("w0", slots=4)
    stage.plan()
    assert slot_use(stage.state) == {"busy": 0, "loading": 4}


def test_leaving_and_paused_are_told_apart() -> None:
    stage = stage_of(staleness__in_flight_batches=2.0)
    stage.join("w1", slots=4)
    stage.settle()
    stage.tell(records.command("drain", worker="w0"))
    assert slot_use(stage.state)["leaving"] == 8
    stage.tell(records.command("pause"))
    assert slot_use(stage.state) == {"busy": 8, "leaving": 8, "pause": 4}
