"""Tests of the automatic in-flight limit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator.apply_decision import apply_decision
from dora_pipe.orchestrator.fold import note_slots
from dora_pipe.orchestrator.in_flight import CHANGE, START, STEPS_EACH, InFlight
from dora_pipe.orchestrator.planner import decide
from dora_pipe.schemas.rounds import TakeBatch
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

B = 32
MS = 1_000_000


def after(
    ready: list[int], *, empty: int, most: float = 3.0, flight: InFlight | None = None
) -> float:
    result, now_ns = flight or InFlight(), 0
    for count in ready:
        for _ in range(2):
            result = result.at_round(now_ns, empty=empty, slots=100)
            now_ns += 500 * MS
        result = result.at_commit(count).at_batch(per_step=B, most=most)
    return result.batches


def test_c_grows_where_the_trainer_lacks_groups_and_slots_are_empty_because_of_it() -> None:
    assert after([20] * STEPS_EACH, empty=30) == START + CHANGE


def test_full_slots_make_no_larger_c_however_long_the_trainer_waits() -> None:
    assert after([0] * 4 * STEPS_EACH, empty=4) == START


def test_c_shrinks_where_more_stands_ready_than_a_batch_and_a_quarter() -> None:
    large = InFlight(batches=3.0)
    assert after([B + B // 4 + 1] * STEPS_EACH, empty=0, flight=large) == 3.0 - CHANGE
    assert after([B + B // 4] * STEPS_EACH, empty=0, flight=large) == 3.0


@given(
    eta=st.integers(0, 4),
    steps=st.lists(st.tuples(st.integers(0, 3 * B), st.integers(0, 100)), max_size=40),
)
def test_c_stays_within_what_the_bound_has_room_for(eta: int, steps: list[tuple[int, int]]) -> None:
    flight, most = InFlight(), eta + 1.0
    for ready, empty in steps:
        before = flight.batches
        flight = flight.at_round(flight.since_ns + 500 * MS, empty=empty, slots=100)
        flight = flight.at_commit(ready).at_batch(per_step=B, most=most)
        assert START <= flight.batches <= max(START, most)
        assert abs(flight.batches - before) <= CHANGE


def stage_of(**changes: Any) -> Stage:
    automatic = {"staleness__async_batches": "auto", "staleness__max_staleness": 2}
    stage = Stage(
        run__steps=60,
        rollout__prompts_per_step=4,
        rollout__group_size=1,
        **{**automatic, **changes},
    ).begin()
    stage.worker("w0", slots=64)
    return stage


def starve(stage: Stage, steps: int) -> list[float | None]:
    texts: list[float | None] = []
    for _ in range(steps):
        open_ = sorted(stage.running())
        for name in open_[:4]:
            stage.finish(name)
        result = stage.settle()
        note_slots(stage.state)
        stage.later(1.0)
        note_slots(stage.state)
        texts += [decision.in_flight for decision in result if isinstance(decision, TakeBatch)]
        stage.commit()
        stage.settle()
    return texts


def test_starved_run_admits_more_and_every_batch_says_how_much() -> None:
    stage = stage_of()
    texts = [entry or 0.0 for entry in starve(stage, 14)]
    assert texts[0] == START and texts[-1] > START + CHANGE
    assert {after - before for before, after in pairwise(texts)} == {0.0, CHANGE}
    assert len(stage.state.groups) > 2 * 4, "more than two batches are in flight"


def test_bound_that_goes_down_holds_at_once_for_an_automatic_c() -> None:
    stage = stage_of()
    starve(stage, 14)
    assert 2.0 < stage.state.async_batches <= 3.0
    stage.tell(records.command("set", staleness__max_staleness=1))
    assert stage.state.async_batches == 2.0
    stage.tell(records.command("set", staleness__max_staleness=0))
    assert stage.state.async_batches == 1.0


def test_batch_with_another_c_is_refused_by_the_fold() -> None:
    stage = stage_of()
    for name in sorted(stage.running())[:4]:
        stage.finish(name)
    before = stage.copy()
    (take,) = [decision for decision in decide(stage.copy()) if isinstance(decision, TakeBatch)]
    with pytest.raises(InvariantBroken, match="unexpected in-flight limit"):
        apply_decision(before, msgspec.structs.replace(take, in_flight=3.0))
