"""Schedule of the deletion of old metrics records.

Age is that of the orchestrator's own records; the last ten minutes always stay, so a new reader
finds a full status of every living role. Kafka's `retention.ms` skipped: a user might set it on
topics that a run needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from dora_pipe.core.pure.records import Record, TopicPartition

TRIM_EVERY_NS: Final = 3600 * 10**9
"""Interval between trims."""

AGAIN_NS: Final = 60 * 10**9
"""Interval if old records remain."""

GUARD_NS_MIN: Final = 600 * 10**9
"""Minimum age; two full-status periods if longer."""


class TrimMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Effect: delete old metrics records."""

    before_ns: int
    """Wall clock."""
    limits: Mapping[TopicPartition, int]
    """Exclusive upper offsets by partition."""


class MetricsTrimmed(msgspec.Struct, frozen=True, kw_only=True):
    """Event: a trim finished or failed."""

    more: bool


class TrimSchedule:
    """Trim schedule; inactive if `keep_ns` is 0."""

    def __init__(self, *, keep_ns: int, whole_ns: int) -> None:
        """`whole_ns`: interval of full worker statuses."""
        self._keep_ns = keep_ns
        self._guard_ns = max(GUARD_NS_MIN, 2 * whole_ns)
        self._read: dict[TopicPartition, int] = {}
        self._marks: tuple[int, dict[TopicPartition, int]] | None = None
        """Positions read, and when; future limits."""
        self._limits: dict[TopicPartition, int] = {}
        self._due_ns = 0

    def note(self, record: Record) -> None:
        """Note a status."""
        self._read[record.at] = record.offset + 1

    def note_trimmed(self, event: MetricsTrimmed, *, mono_ns: int) -> None:
        if event.more:
            self._due_ns = min(self._due_ns, mono_ns + AGAIN_NS)

    def ask(self, *, mono_ns: int, wall_ns: int) -> list[TrimMetrics]:
        """Return a trim if one is due."""
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
