"""Leases of workers and time limits of groups, on the orchestrator's receive clock.

Leases start after the log has been read. They pause while the orchestrator does not react or
records are held back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Generic, TypeVar

Incarnation = tuple[str, int]

One = TypeVar("One", Incarnation, str)


class Leases(Generic[One]):
    """Last-heard times in monotonic ns; gaps above `gap_ns` do not count. A lease of None never
    ends."""

    def __init__(self, gap_ns: int) -> None:
        self._gap_ns = gap_ns
        self._turned_ns: int | None = None
        self._gaps_ns = 0
        """Excluded from every lease."""
        self._held = False
        self._heard_ns: dict[One, int] | None = None
        """Without earlier gaps; oldest first."""

    def turn(self, now_ns: int) -> None:
        """Note a reaction."""
        gap_ns = 0 if self._turned_ns is None else now_ns - self._turned_ns
        self._turned_ns = now_ns
        if (self._held or gap_ns > self._gap_ns) and self._heard_ns is not None:
            self._gaps_ns += gap_ns

    def hold(self, held: bool) -> None:
        """Pause or resume all leases."""
        self._held = held

    def start(self, living: Iterable[One], now_ns: int) -> None:
        """Start the leases."""
        self._heard_ns = dict.fromkeys(living, now_ns - self._gaps_ns)

    def renew(self, key: One, now_ns: int) -> None:
        """Renew a lease."""
        if self._heard_ns is not None:
            self._heard_ns.pop(key, None)
            self._heard_ns[key] = now_ns - self._gaps_ns

    def expired(self, lives: Callable[[One], bool], now_ns: int, lease_ns: int | None) -> list[One]:
        """Return living entries with expired leases, sorted."""
        heard: dict[One, int] = self._heard_ns or {}
        if lease_ns is None:
            return []
        last_ns = now_ns - self._gaps_ns - lease_ns
        over: list[One] = list(takewhile(lambda key: heard[key] <= last_ns, heard))
        ended = sorted(filter(lives, over))
        for key in over:
            if not lives(key):
                del heard[key]
        return ended

    def keep(self, lives: Callable[[One], bool]) -> None:
        """Forget entries that are not living."""
        if self._heard_ns is not None:
            heard = self._heard_ns.items()
            self._heard_ns = {key: heard_ns for key, heard_ns in heard if lives(key)}

    def due_ns(self, lease_ns: int | None) -> int | None:
        """Return the next expiry; None without leases."""
        if self._held or not self._heard_ns or lease_ns is None:
            return None
        return next(iter(self._heard_ns.values())) + self._gaps_ns + lease_ns
