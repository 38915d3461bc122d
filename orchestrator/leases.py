"""Decides which workers have been silent for too long, and which groups open, on the orchestrator's
own receive clock.

A lease starts only when the orchestrator has caught up with the log, and stands still while the
orchestrator does not react (an outage of the bus, a stopped process, a restart) or cannot read what
was said (somebody died inside an append): none of that fences anybody, or ends a group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Generic, TypeVar

from dora_pipe.orchestrator.state import State

Incarnation = tuple[str, int]
"""A worker's name and role epoch."""

One = TypeVar("One", Incarnation, str)


class Leases(Generic[One]):
    """When each incarnation was heard last, or each group dispatched. Times are monotonic ns of
    this process.

    Example: ``Leases(lease_ns=10 * 10**9, gap_ns=10**9)``; between two `turn`s more than `gap_ns`
    apart no lease runs down.
    """

    def __init__(self, *, lease_ns: int, gap_ns: int) -> None:
        self._lease_ns = lease_ns
        self._gap_ns = gap_ns
        self._turned_ns: int | None = None
        self._gaps_ns = 0
        """All gaps so far: time that counts against nobody."""
        self._held = False
        self._heard_ns: dict[One, int] | None = None
        """Without the gaps before it; who was silent for longest comes first."""

    def turn(self, now_ns: int) -> None:
        """The orchestrator reacts now; a gap since the last time counts against nobody."""
        gap_ns = 0 if self._turned_ns is None else now_ns - self._turned_ns
        self._turned_ns = now_ns
        if (self._held or gap_ns > self._gap_ns) and self._heard_ns is not None:
            self._gaps_ns += gap_ns

    def hold(self, held: bool) -> None:
        """From this turn on, what is said may be unreadable: silence counts against nobody."""
        self._held = held

    def start(self, living: Iterable[One], now_ns: int) -> None:
        """The log has been read: from now on silence counts."""
        self._heard_ns = dict.fromkeys(living, now_ns - self._gaps_ns)

    def renew(self, one: One, now_ns: int) -> None:
        """Something came from this incarnation; before the start it does not matter."""
        if self._heard_ns is not None:
            self._heard_ns.pop(one, None)
            self._heard_ns[one] = now_ns - self._gaps_ns

    def expired(self, living: Container[One], now_ns: int) -> list[One]:
        """Who was not heard for a lease, sorted; who is silent and not living is forgotten."""
        found: list[One] = []
        last_ns = now_ns - self._gaps_ns - self._lease_ns
        gone: list[One] = []
        for one, heard_ns in (self._heard_ns or {}).items():
            if heard_ns > last_ns:
                break
            (found if one in living else gone).append(one)
        for one in gone:
            assert self._heard_ns is not None
            del self._heard_ns[one]
        return sorted(found)

    def keep(self, living: Container[One]) -> None:
        """Forget who is not there any more."""
        if self._heard_ns is not None:
            self._heard_ns = {one: at for one, at in self._heard_ns.items() if one in living}

    def due_ns(self) -> int | None:
        """When the next lease expires if nothing is heard; None if none runs."""
        if self._held or not self._heard_ns:
            return None
        return next(iter(self._heard_ns.values())) + self._gaps_ns + self._lease_ns


class Living:
    """The incarnations that are there, to be asked for one by one."""

    def __init__(self, state: State) -> None:
        self._workers = state.workers

    def __contains__(self, one: object) -> bool:
        assert isinstance(one, tuple)
        worker = self._workers.get(one[0])
        return worker is not None and worker.epoch == one[1]


class Generating:
    """The groups that generate, to be asked for one by one."""

    def __init__(self, state: State) -> None:
        self._groups = state.groups

    def __contains__(self, one: object) -> bool:
        group = self._groups.get(one) if isinstance(one, str) else None
        return group is not None and group.phase == "generating"
