"""Tests of the planner's time estimates."""

from __future__ import annotations

import pytest

from dora_pipe.orchestrator.estimates import STALL_MIN_NS, STALL_NS, Estimates, Outlook

SECOND = 1_000_000_000


def estimates_of(*lives_s: float) -> Estimates:
    estimates = Estimates()
    for entry in lives_s:
        estimates.lived(int(entry * SECOND))
    return estimates


def test_without_history_a_request_is_expected_to_live_as_long_again() -> None:
    outlook = Outlook(Estimates())
    assert outlook.left_ns(16 * SECOND) == pytest.approx(16 * SECOND, rel=0.13)


def test_long_tail_makes_old_requests_live_longer_than_young_ones() -> None:
    outlook = Outlook(estimates_of(*[1.0] * 900, *[200.0] * 100))
    assert outlook.left_ns(10 * SECOND) > 5 * outlook.left_ns(0)


def test_cost_of_a_move_follows_what_moves_took_but_is_never_nothing() -> None:
    estimates = Estimates()
    assert estimates.stall_ns == STALL_NS
    for _ in range(100):
        estimates.released(2 * SECOND)
    assert estimates.stall_ns == pytest.approx(4 * SECOND, rel=0.01)
    for _ in range(200):
        estimates.released(0)
    assert estimates.stall_ns == pytest.approx(STALL_MIN_NS, rel=0.01)
