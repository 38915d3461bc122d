"""Tests that leases run only while the orchestrator listens."""

from __future__ import annotations

from dora_pipe.orchestrator.leases import Incarnation, Leases

A, B = ("a", 1), ("b", 2)
LEASE_NS = 10


def leases() -> Leases[Incarnation]:
    return Leases(2)


def listen(result: Leases[Incarnation], start: int, end: int) -> None:
    for now in range(start, end + 1):
        result.turn(now)


def test_nobody_is_silent_before_the_log_was_read() -> None:
    actual_leases = leases()
    actual_leases.renew(A, 0)
    listen(actual_leases, 0, 50)
    assert actual_leases.expired([A].__contains__, 50, LEASE_NS) == []
    assert actual_leases.due_ns(LEASE_NS) is None


def test_lease_starts_when_the_log_was_read_and_ends_after_its_length() -> None:
    actual_leases = leases()
    listen(actual_leases, 0, 50)
    actual_leases.start([A, B], 50)
    listen(actual_leases, 51, 59)
    actual_leases.renew(B, 55)
    assert actual_leases.expired([A, B].__contains__, 59, LEASE_NS) == []
    assert actual_leases.due_ns(LEASE_NS) == 60
    assert actual_leases.expired([A, B].__contains__, 60, LEASE_NS) == [A]
    assert actual_leases.expired([A, B].__contains__, 65, LEASE_NS) == [A, B]


def test_gap_in_listening_counts_against_nobody() -> None:
    actual_leases = leases()
    actual_leases.turn(0)
    actual_leases.start([A], 0)
    listen(actual_leases, 1, 5)
    actual_leases.turn(1000)
    assert actual_leases.expired([A].__contains__, 1000, LEASE_NS) == []
    listen(actual_leases, 1001, 1004)
    assert actual_leases.expired([A].__contains__, 1004, LEASE_NS) == []
    assert actual_leases.expired([A].__contains__, 1005, LEASE_NS) == [A], (
        "what had run down before the gap stays run down"
    )
