"""Decides which workers have been silent for too long, on the orchestrator's own receive clock.

A lease starts only when the orchestrator has caught up with the log, and stands still while the
orchestrator does not react: an outage of the bus, a stopped process or a restart fences nobody.
"""

from __future__ import annotations

from collections.abc import Iterable

Incarnation = tuple[str, int]
"""A worker's name and role epoch."""


class Leases:
    """When each incarnation was heard last. Times are monotonic ns of this process.

    Example: ``Leases(lease_ns=10 * 10**9, gap_ns=10**9)``; between two `turn`s more than `gap_ns`
    apart no lease runs down.
    """

    def __init__(self, *, lease_ns: int, gap_ns: int) -> None:
        self._lease_ns = lease_ns
        self._gap_ns = gap_ns
        self._turned_ns: int | None = None
        self._heard_ns: dict[Incarnation, int] | None = None

    def turn(self, now_ns: int) -> None:
        """The orchestrator reacts now; a gap since the last time counts against nobody."""
        gap_ns = 0 if self._turned_ns is None else now_ns - self._turned_ns
        self._turned_ns = now_ns
        if gap_ns > self._gap_ns and self._heard_ns is not None:
            for one in self._heard_ns:
                self._heard_ns[one] += gap_ns

    def start(self, living: Iterable[Incarnation], now_ns: int) -> None:
        """The log has been read: from now on silence counts."""
        self._heard_ns = dict.fromkeys(living, now_ns)

    def hear(self, one: Incarnation, now_ns: int) -> None:
        """Something came from this incarnation; before the start it does not matter."""
        if self._heard_ns is not None:
            self._heard_ns[one] = now_ns

    def expired(self, living: Iterable[Incarnation], now_ns: int) -> list[Incarnation]:
        """Who was not heard for a lease, sorted; everybody else who is not living is forgotten."""
        if self._heard_ns is None:
            return []
        self._heard_ns = {one: self._heard_ns.get(one, now_ns) for one in living}
        last_ns = now_ns - self._lease_ns
        return sorted(one for one, heard_ns in self._heard_ns.items() if heard_ns <= last_ns)

    def due_ns(self) -> int | None:
        """When the next lease expires if nothing is heard; None if none runs."""
        if not self._heard_ns:
            return None
        return min(self._heard_ns.values()) + self._lease_ns
