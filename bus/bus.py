"""Interface of the log: append to partitions, read from positions, fence writers.

Rules of every implementation, tested by one contract suite:

1. Offsets of a partition increase with gaps, at least one after each exclusive append. A *position*
   is the first offset that a reader has not passed. Compare `reader.position(tp) >= bus.end(tp)`,
   never "last offset + 1".
2. `Writer.append` is durable and keeps the order per partition; other writers' records may come
   between. After `OutcomeUnknown` any prefix may exist and an exclusive writer stops: open another,
   read, then decide.
3. An exclusive writer fences earlier ones of its name: their appends raise `Fenced` and stay
   invisible.
4. Readers see only durable records, and each once between two seeks.
5. An unfinished exclusive append holds readers back, for at most `HELD_LIMIT_S`. `end` is the
   visible end, `written_end` the acknowledged one. To decide, read up to `written_end`
   (`core.loop.run_lifecycle`).
6. `trim` deletes old records of `TRIMMED_TOPICS`, whose readers continue at the first one left. In
   other topics a position before the first record is a LogTruncated.
7. Every wait has a deadline. Use a reader or writer in one thread, and nothing opened before a
   fork.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dora_pipe.core.pure.records import Append, Record, TopicPartition

HELD_LIMIT_S: Final = 120.0
"""Maximum seconds that our writers hold readers back; 42 s with a broker's defaults."""

TRIMMED_TOPICS: Final = ("metrics",)
"""Last name parts of topics whose old records may be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """Settings of a topic."""

    name: str
    partitions: int = 1
    max_record_bytes: int = 10 * 1024 * 1024
    """Maximum bytes of key, value and headers; larger: `RecordTooLarge`."""


class Reader(Protocol):
    """Reader of given partitions, in offset order per partition."""

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """Return the next records, waiting up to `timeout_s`; at least one even above `bytes_max`.

        Raises LogTruncated if the position is after the end or before a kept partition's begin,
        BusError if the log is unreadable.
        """
        ...

    def position(self, tp: TopicPartition) -> int:
        """Return the first offset not passed; advances over gaps too."""
        ...

    def held_back(self) -> list[TopicPartition]:
        """Return the sorted partitions with acknowledged records that are delayed or unreadable;
        sends no request."""
        ...

    def seek(self, tp: TopicPartition, position: int) -> None:
        """Continue at `position`, which may be an unused offset."""
        ...

    def close(self) -> None:
        """Release everything; idempotent."""
        ...


class Writer(Protocol):
    """Appender of records; exclusive writers carry an epoch."""

    def append(self, records: Sequence[Append]) -> list[int]:
        """Append all durably and return their offsets in order.

        Raises Fenced, OutcomeUnknown, or without an append BusFull, TopicMissing, RecordRefused and
        RecordTooLarge; after the last two an exclusive writer remains usable.
        """
        ...

    def close(self) -> None: ...


class Bus(Protocol):
    """Log of topics. Opening one never creates topics."""

    def create(self, topics: Sequence[TopicSpec]) -> None:
        """Create missing topics. Raises BusError if an existing one is too small."""
        ...

    def topics(self) -> list[str]: ...

    def partitions(self, topic: str) -> int:
        """Raises TopicMissing."""
        ...

    def begin(self, tp: TopicPartition) -> int:
        """Return the first readable position. Raises TopicMissing."""
        ...

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Delete a bounded number of the oldest records before a position; True means call again.

        Raises TopicMissing, AccessRefused, and BusError outside `TRIMMED_TOPICS`.
        """
        ...

    def end(self, tp: TopicPartition) -> int:
        """Return the position after the last visible record. Raises TopicMissing."""
        ...

    def written_end(self, tp: TopicPartition) -> int:
        """Return the position after the last acknowledged record. Raises TopicMissing."""
        ...

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        """Return a reader of exactly these partitions. Raises TopicMissing."""
        ...

    def writer(self, *, exclusive: str | None = None) -> Writer:
        """Return a writer; `exclusive` fences earlier writers of that name."""
        ...

    def close(self) -> None:
        """Close the bus with its readers and writers; idempotent."""
        ...
