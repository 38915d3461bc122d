"""Decides when old statuses are deleted, and which: what metrics records say is not kept for ever.

Statuses are dated by the orchestrator's own alone, and whatever a clock says, those of its last ten
minutes or more stay: every living role says a whole status in half of that time, so whoever begins
to read at what is left knows all of the present.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from dora_pipe.bus.port import Record, TopicPartition

TRIM_EVERY_NS: Final = 3600 * 10**9
"""From one look for old statuses to the next."""

AGAIN_NS: Final = 60 * 10**9
"""The same where the last one has left some that are old enough."""

GUARD_NS_MIN: Final = 600 * 10**9
"""What was read so lately stays, or in the time of two whole statuses of a worker, if that is
longer."""


class TrimMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Delete statuses that were said before a moment, a bounded number."""

    before_ns: int
    """Wall clock."""
    limits: Mapping[TopicPartition, int]
    """Nothing from these positions on is deleted, whatever its date; no other partition is."""


class MetricsTrimmed(msgspec.Struct, frozen=True, kw_only=True):
    """It is done, or was not possible."""

    more: bool
    """There are more to delete."""


class TrimSchedule:
    """When one incarnation of the orchestrator asks for a trim. With `keep_ns` 0 it never does.

    Example: ``out.effects += schedule.ask(mono_ns=now.mono_ns, wall_ns=now.wall_ns)``
    """

    def __init__(self, *, keep_ns: int, whole_ns: int) -> None:
        """`whole_ns`: a worker says a whole status in that time (`status_schedule.whole_ns`)."""
        self._keep_ns = keep_ns
        self._guard_ns = max(GUARD_NS_MIN, 2 * whole_ns)
        self._read: dict[TopicPartition, int] = {}
        self._marks: tuple[int, dict[TopicPartition, int]] | None = None
        """What had been read, and when; it becomes the limits when it is old enough."""
        self._limits: dict[TopicPartition, int] = {}
        self._due_ns = 0

    def note(self, record: Record) -> None:
        """A status was read."""
        self._read[record.at] = record.offset + 1

    def note_trimmed(self, event: MetricsTrimmed, *, mono_ns: int) -> None:
        """A trim has ended."""
        if event.more:
            self._due_ns = min(self._due_ns, mono_ns + AGAIN_NS)

    def ask(self, *, mono_ns: int, wall_ns: int) -> list[TrimMetrics]:
        """A trim, if one is due."""
        if not self._keep_ns or mono_ns < self._due_ns:
            return []
        if self._marks is None:
            self._marks = mono_ns, dict(self._read)
        elif mono_ns - self._marks[0] >= self._guard_ns:
            self._limits = self._marks[1]
            self._marks = mono_ns, dict(self._read)
        if not self._limits:
            return []
        self._due_ns = mono_ns + TRIM_EVERY_NS
        return [TrimMetrics(before_ns=wall_ns - self._keep_ns, limits=self._limits)]
