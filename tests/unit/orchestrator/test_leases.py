"""Tests that leases run only while the orchestrator listens."""

from __future__ import annotations

from dora_pipe.orchestrator.leases import Incarnation, Leases

A, B = ("a", 1), ("b", 2)


def leases() -> Leases[Incarnation]:
    """Length 10, gaps from 2 on."""
    return Leases(lease_ns=10, gap_ns=2)


def listen(found: Leases[Incarnation], start: int, end: int) -> None:
    """React every tick, without a gap."""
    for now in range(start, end + 1):
        found.turn(now)


def test_nobody_is_silent_before_the_log_was_read() -> None:
    found = leases()
    found.renew(A, 0)
    listen(found, 0, 50)
    assert found.expired([A], 50) == []
    assert found.due_ns() is None


def test_lease_starts_when_the_log_was_read_and_ends_after_its_length() -> None:
    found = leases()
    listen(found, 0, 50)
    found.start([A, B], 50)
    listen(found, 51, 59)
    found.renew(B, 55)
    assert found.expired([A, B], 59) == []
    assert found.due_ns() == 60
    assert found.expired([A, B], 60) == [A]
    assert found.expired([A, B], 65) == [A, B]


def test_gap_in_listening_counts_against_nobody() -> None:
    found = leases()
    found.turn(0)
    found.start([A], 0)
    listen(found, 1, 5)
    found.turn(1000)
    assert found.expired([A], 1000) == []
    listen(found, 1001, 1004)
    assert found.expired([A], 1004) == []
    assert found.expired([A], 1005) == [A], "what had run down before the gap stays run down"
