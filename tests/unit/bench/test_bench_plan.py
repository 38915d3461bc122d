"""Tests of `bench plan` on a run with moves and snapshots."""

from __future__ import annotations

from dora_pipe.bench.plan import SNAPSHOT_EVERY, bench_turns


def test_turns_are_measured_in_a_run_that_trains_moves_and_is_kept_in_snapshots() -> None:
    (figure,) = bench_turns([16], slots=20, rounds=2 * SNAPSHOT_EVERY)
    assert figure.turns == 2 * SNAPSHOT_EVERY and figure.steps > 5
    assert 100 < figure.requests <= 320
    assert 0 < figure.p50_ms < figure.turn_ms
