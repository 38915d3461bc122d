"""Decides when a role says its status: news at the next heartbeat, else once in a quiet period.

Statuses are the only records that come although nothing happens, so this is what a log without
work grows by. A status also pays for its size: a role may say `HEARTBEAT_BYTES` per heartbeat, what
it has not used is saved for a quiet period, and what it has overdrawn keeps its next news back.
Nothing is kept back for longer than a quiet period, which is a quarter of a lease at most.

Where a role appends what must not be lost, it waits; its statuses go by a writer of their own
(`BackgroundWriter`), for which nobody does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

import msgspec

from dora_pipe.bus.port import Append, Writer
from dora_pipe.config.model import Timing
from dora_pipe.core.effect_runner import EffectRunner, Handler
from dora_pipe.core.errors import BusError
from dora_pipe.core.runtime import Publish
from dora_pipe.schemas.metrics import Cost, Metrics
from dora_pipe.schemas.wire import encode

M = TypeVar("M", bound=Metrics)

QUIET_HEARTBEATS: Final = 5
"""A role without news is heard this many heartbeats apart."""

QUIET_LEASES: Final = 4
"""A role is heard at least so many times in a lease."""

WHOLE_EVERY: Final = 20
"""Every so many statuses of a worker one says all its progress, the others what has changed:
whoever begins to read in the middle knows everything soon."""

HEARTBEAT_BYTES: Final = 400
"""Of statuses, per heartbeat: about one without progress."""

_NO_COST: Final = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)


def quiet_ns(timing: Timing) -> int:
    """The quiet period, at least a heartbeat. Example: 2.5 s with a heartbeat of 0.5 and a lease of
    10 s."""
    quiet_s = min(QUIET_HEARTBEATS * timing.heartbeat_s, timing.lease_s / QUIET_LEASES)
    return int(max(timing.heartbeat_s, quiet_s) * 1e9)


def whole_ns(timing: Timing) -> int:
    """A living worker says all its progress in every time of this length."""
    return WHOLE_EVERY * quiet_ns(timing)


class Address(NamedTuple):
    """Where the statuses of a role go. Example: ``Address("r.metrics", b"w0")``"""

    topic: str
    key: bytes


class StatusSchedule:
    """The statuses of one incarnation. Times are monotonic ns.

    With a quiet period of a heartbeat or less, every heartbeat has its status.

    Example: ``out.publish += schedule.publish(status, Address("r.metrics", b"w0"), now_ns)``
    """

    def __init__(self, *, heartbeat_ns: int, quiet_ns: int) -> None:
        self.due_ns = 0
        """When the next status is to be made, and shown to `goes_out`."""
        self._heartbeat_ns = heartbeat_ns
        self._quiet_ns = max(quiet_ns, heartbeat_ns)
        self._last: Metrics | None = None
        self._said_ns = 0
        self._paid_ns: int | None = None
        """When what was said is paid for."""
        self._hurries = False
        """The next one does not wait for that."""

    def publish(
        self, status: M, to: Address, now_ns: int, shorten: Callable[[M], M] = lambda status: status
    ) -> list[Publish]:
        """The status as a record, if it goes out now; `shorten` leaves out what is known."""
        if not self.goes_out(status, now_ns):
            return []
        record = Append(topic=to.topic, key=to.key, value=encode(shorten(status)))
        self.note_sent(len(record.key) + len(record.value), now_ns)
        return [Publish(record=record, lossy=True)]

    def goes_out(self, status: Metrics, now_ns: int) -> bool:
        """Whether this status goes out. All of it is news but when it was made and what it cost."""
        content = msgspec.structs.replace(status, at_ns=0, cost=_NO_COST)
        quiet_ends_ns = self._said_ns + self._quiet_ns
        self.due_ns = now_ns + self._heartbeat_ns
        if self._last is not None and now_ns < quiet_ends_ns:
            self.due_ns = min(self.due_ns, quiet_ends_ns)
            if content == self._last:
                return False
            if self._paid_ns is not None and now_ns < self._paid_ns and not self._hurries:
                self.due_ns = min(self.due_ns, self._paid_ns)
                return False
        self.due_ns = now_ns + self._heartbeat_ns
        self._last, self._said_ns, self._hurries = content, now_ns, False
        return True

    def note_sent(self, size_bytes: int, now_ns: int) -> None:
        """A status of this size has gone out, key and value together."""
        if self._quiet_ns <= self._heartbeat_ns:
            return
        price_ns = size_bytes * self._heartbeat_ns // HEARTBEAT_BYTES
        saved_from_ns = now_ns - self._quiet_ns
        before_ns = saved_from_ns if self._paid_ns is None else max(self._paid_ns, saved_from_ns)
        self._paid_ns = min(before_ns + price_ns, now_ns + self._quiet_ns)

    def bring_forward(self, after_ns: int, *, unpaid: bool = False) -> None:
        """News that should not wait for the heartbeat: `after_ns` behind the last status, or when
        that one is paid for. `unpaid` ones do not wait for that either: they come with work."""
        if self._last is not None:
            self._hurries |= unpaid
            soonest_ns = max(self._said_ns + after_ns, 0 if unpaid else self._paid_ns or 0)
            self.due_ns = min(self.due_ns, soonest_ns)


CLOSE_LIMIT_S: Final = 1.0
"""For the last records of a role that ends; a broker that is away must not hold it up."""


@dataclass(frozen=True, slots=True)
class _AppendLossy:
    """Records that may be lost."""

    records: Sequence[Append]


class BackgroundWriter:
    """Takes a plain writer and never waits for it. While an append is under way, others are left
    out: what they would say is said anew soon.

    Example: ``Runtime(..., status=BackgroundWriter(bus.writer()))``
    """

    def __init__(self, inner: Writer) -> None:
        self._inner = inner
        handler = Handler(do=self._append, failed=lambda effect, error: [error])
        self._runner = EffectRunner("status", {_AppendLossy: handler}, asked_max=1)

    def append(self, records: Sequence[Append]) -> list[int]:
        """Returns at once and knows no offsets. Raises what the last append raised."""
        if self._runner.working:
            return []
        failed = self._runner.poll()
        self._runner.start(_AppendLossy(records))
        for error in failed:
            raise error
        return []

    def close(self) -> None:
        """Wait a moment for what is under way, then let go of the writer; idempotent."""
        self._runner.close(wait_s=CLOSE_LIMIT_S)
        self._inner.close()

    def _append(self, effect: _AppendLossy) -> Iterable[BusError]:
        try:
            self._inner.append(effect.records)
        except BusError as error:  # the runtime says it once
            return [error]
        return ()
