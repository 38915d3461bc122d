"""`bench plan` measures what it says: full workers of four versions, moves after a step, a fit."""

from __future__ import annotations

import pytest

from dora_pipe.bench.plan import SLOTS, bench_plan, exponent, growth_of
from dora_pipe.bench.turns import SNAPSHOT_EVERY, bench_turns


def test_every_slot_of_four_versions_runs_a_request_and_a_step_empties_workers() -> None:
    few, more = bench_plan([16, 8])
    assert (few.workers, more.workers) == (8, 16)
    assert few.requests == 8 * SLOTS and more.requests == 16 * SLOTS
    assert few.versions == 4
    assert 0 < few.step_moves <= few.step_decisions
    assert few.all_moves >= few.step_moves
    assert min(few.turn_ms, few.look_ms, few.step_ms, few.fold_us) > 0
    assert (few.state_mb is None) and (more.state_mb is not None), "the largest is built first"


def test_growth_is_fitted_over_sizes_and_not_over_one() -> None:
    figures = bench_plan([8])
    assert growth_of(figures) == []
    assert {one.cost for one in growth_of([*figures, *bench_plan([12])])} == {
        "turn_ms",
        "look_ms",
        "step_ms",
        "fold_us",
    }


def test_exponent_is_the_slope_between_logarithms() -> None:
    assert exponent([1, 2, 4, 8], [3, 6, 12, 24]) == pytest.approx(1)
    assert exponent([10, 100, 1000], [5, 500, 50_000]) == pytest.approx(2)
    assert exponent([1, 10], [7, 7]) == pytest.approx(0)


def test_turns_are_measured_in_a_run_that_trains_moves_and_is_kept_in_snapshots() -> None:
    (figure,) = bench_turns([16], slots=20, rounds=2 * SNAPSHOT_EVERY)
    assert figure.turns == 2 * SNAPSHOT_EVERY and figure.steps > 5
    assert 100 < figure.requests <= 320
    parts = (figure.decide_ms, figure.encode_ms, figure.digest_ms, figure.snapshot_ms)
    assert 0 < max(parts) < figure.turn_ms
    assert min(*parts, figure.waits_ms) > 0
    assert 0 < figure.p50_ms < figure.turn_ms
