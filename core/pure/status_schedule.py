"""Schedule of a role's statuses: changes at the next heartbeat, otherwise once per quiet period.

The byte budget is `HEARTBEAT_BYTES` per heartbeat: unused bytes accumulate, overdrafts delay the
next status, for at most a quiet period (a quarter of a lease or less).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

import msgspec

from dora_pipe.config.model import Timing
from dora_pipe.core.pure.machine import Publish
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.metrics import Cost, Metrics
from dora_pipe.schemas.wire import encode

M = TypeVar("M", bound=Metrics)

QUIET_HEARTBEATS: Final = 5
QUIET_LEASES: Final = 4
WHOLE_EVERY: Final = 20
"""Statuses per complete one; the others have only changed progress."""

HEARTBEAT_BYTES: Final = 400
"""Status bytes per heartbeat; about one without progress."""

_NO_COST: Final = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)


def quiet_ns(timing: Timing) -> int:
    """Return the quiet period, at least a heartbeat. Example: 2.5 s with a heartbeat of 0.5 and a
    lease of 10 s."""
    quiet_s = min(QUIET_HEARTBEATS * timing.heartbeat_s, timing.lease_s / QUIET_LEASES)
    return int(max(timing.heartbeat_s, quiet_s) * 1e9)


class Address(NamedTuple):
    """Target of statuses."""

    topic: str
    key: bytes


class StatusSchedule:
    """Statuses of one incarnation; times are monotonic ns.

    A quiet period of at most a heartbeat gives a status every heartbeat. Example: ``out.publish +=
    schedule.publish(status, Address("r.metrics", b"w0"), now_ns)``
    """

    def __init__(self, *, heartbeat_ns: int, quiet_ns: int) -> None:
        self.due_ns = 0
        """When to offer the next status to `goes_out`."""
        self._heartbeat_ns = heartbeat_ns
        self._quiet_ns = max(quiet_ns, heartbeat_ns)
        self._last: Metrics | None = None
        self._said_ns = 0
        self._paid_ns: int | None = None
        """When the budget is positive again."""

    def publish(
        self, status: M, to: Address, now_ns: int, shorten: Callable[[M], M] = lambda status: status
    ) -> list[Publish]:
        """Return the status if due; `shorten` omits known content."""
        if not self.goes_out(status, now_ns):
            return []
        record = Append(topic=to.topic, key=to.key, value=encode(shorten(status)))
        self.note_sent(len(record.key) + len(record.value), now_ns)
        return [Publish(record=record, lossy=True)]

    def goes_out(self, status: Metrics, now_ns: int) -> bool:
        """Return whether a status is due; time and cost are not changes."""
        content = msgspec.structs.replace(status, at_ns=0, cost=_NO_COST)
        quiet_ends_ns = self._said_ns + self._quiet_ns
        self.due_ns = now_ns + self._heartbeat_ns
        if self._last is not None and now_ns < quiet_ends_ns:
            self.due_ns = min(self.due_ns, quiet_ends_ns)
            if content == self._last:
                return False
            if self._paid_ns is not None and now_ns < self._paid_ns:
                self.due_ns = min(self.due_ns, self._paid_ns)
                return False
        self.due_ns = now_ns + self._heartbeat_ns
        self._last, self._said_ns = content, now_ns
        return True

    def note_sent(self, size_bytes: int, now_ns: int) -> None:
        if self._quiet_ns <= self._heartbeat_ns:
            return
        price_ns = size_bytes * self._heartbeat_ns // HEARTBEAT_BYTES
        saved_from_ns = now_ns - self._quiet_ns
        before_ns = saved_from_ns if self._paid_ns is None else max(self._paid_ns, saved_from_ns)
        self._paid_ns = min(before_ns + price_ns, now_ns + self._quiet_ns)

    def bring_forward(self, after_ns: int) -> None:
        """Make a status due `after_ns` after the last one, within the budget."""
        if self._last is not None:
            self.due_ns = min(self.due_ns, max(self._said_ns + after_ns, self._paid_ns or 0))
