"""The port of the log: append to partitions, read from positions, fence a writer; decides nothing.

Rules every implementation keeps (one contract suite checks them):

1. Offsets of a partition increase but are not dense: an exclusive writer's append leaves at least
   one unused behind it. A *position* is where a reader goes on: the first offset it has not
   passed. "Caught up" means `reader.position(tp) >= bus.end(tp)`, never "last offset + 1": markers
   and skipped offsets pass a reader without a record.
2. `Writer.append` is one durable call: when it returns, every record survives what the bus
   promises, in the given order per partition; records of other writers may lie between (a broker
   batches as it likes). When it raises `OutcomeUnknown`, any prefix may be
   there, and an exclusive writer refuses to go on: open another one, read, and only then decide.
3. An exclusive writer fences every earlier writer of the same name: their next append raises
   `Fenced` and none of its records is ever seen by a reader.
4. Readers only see what was appended durably, and never see a record twice between two seeks.
5. What a dead exclusive writer left half done may hold readers back: they stop before it, although
   records behind it were acknowledged. `end` is as far as readers may see, `written_end` as far as
   records go; they are equal again at the latest `HELD_LIMIT_S` later. Who reads to the end in
   order to decide reads to a written end (`core.run_lifecycle`).
6. Topics of `TRIMMED_TOPICS` hold what nothing else rests on; `trim` deletes their old records, and
   their readers go on at the first one that is left. No offset changes by that, nor the end. In
   every other topic a position before the first record is a LogTruncated.
7. Every wait has a deadline. One thread uses one reader or writer, and nothing that was opened
   before a fork is used after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import msgspec

HELD_LIMIT_S: Final = 120.0
"""Readers are held back for so long at most by a writer of ours; a broker ends what one of them
left open within 42 s with its own defaults (docs/kafka.md)."""

TRIMMED_TOPICS: Final = ("metrics",)
"""Last parts of the names of topics whose old records may be deleted."""


class TopicPartition(NamedTuple):
    """One partition of one topic, e.g. ``TopicPartition("demo.control", 0)``."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """How a topic is created. Example: ``TopicSpec(name="demo.trajectories", partitions=4)``."""

    name: str
    partitions: int = 1
    record_bytes_max: int = 10 * 1024 * 1024
    """Key, value, header names and values together; more is refused with `RecordTooLarge`."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """A record to append. Header names and values are ASCII; keys may be empty."""

    topic: str
    value: bytes
    partition: int = 0
    key: bytes = b""
    headers: tuple[tuple[str, bytes], ...] = ()
    digest: str = ""
    """Of the value, where its maker has computed it (`wire.value_digest`); no log keeps it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record as a reader sees it."""

    topic: str
    partition: int
    offset: int
    key: bytes
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = field(default=())
    checked: str = field(default="", compare=False)
    """The digest that its value was just found to have; empty where nobody has looked. Who changes
    the value takes it away."""

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def stored(record: Append, offset: int) -> Record:
    """An appended record as readers see it."""
    return Record(
        topic=record.topic,
        partition=record.partition,
        offset=offset,
        key=record.key,
        value=record.value,
        headers=record.headers,
    )


class Reader(Protocol):
    """Reads given partitions from given positions, in offset order per partition."""

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """Records from the present positions on; waits up to `timeout_s` for the first one.

        Returns early as soon as anything is there; 0 never waits. At least one record comes back
        even if it alone is larger than `bytes_max`. Raises LogTruncated when a position lies beyond
        what is there (something acknowledged is gone) or before it (retention has deleted it, and
        not from a topic that may be trimmed), BusError when the log cannot be read.
        """
        ...

    def position(self, tp: TopicPartition) -> int:
        """The first offset not passed yet; advances over gaps although no record is returned."""
        ...

    def held_back(self) -> list[TopicPartition]:
        """The partitions in which acknowledged records lie behind what may be read, sorted.

        Also those whose records the log delays (a quota): slow, not lost.
        As the last polls have learnt it beside the records; it asks nobody.
        """
        ...

    def seek(self, tp: TopicPartition, position: int) -> None:
        """Go on from `position`, which need not be an existing offset."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class Writer(Protocol):
    """Appends records; exclusive writers carry an epoch that the bus checks at every append."""

    def append(self, records: Sequence[Append]) -> list[int]:
        """Append all, durably, and return their offsets in the given order.

        Raises Fenced, OutcomeUnknown, RecordRefused and RecordTooLarge (an exclusive writer
        appended nothing and goes on), BusFull (nothing was appended), TopicMissing (nothing was
        appended).
        """
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class Bus(Protocol):
    """A log of topics. Opening one never creates topics."""

    def create(self, topics: Sequence[TopicSpec]) -> None:
        """Create the topics that do not exist; one that exists and is too small: BusError."""
        ...

    def topics(self) -> list[str]:
        """Names of all topics, sorted."""
        ...

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has. Raises TopicMissing."""
        ...

    def begin(self, tp: TopicPartition) -> int:
        """The first position that can be read: 0 until something deletes. Raises TopicMissing."""
        ...

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Delete a bounded number of the oldest records before a position; True: call again.

        The very last record may stay. Raises TopicMissing, BusError for a topic that must be kept
        (see `TRIMMED_TOPICS`), AccessRefused.
        """
        ...

    def end(self, tp: TopicPartition) -> int:
        """The position after the last visible record. Raises TopicMissing."""
        ...

    def written_end(self, tp: TopicPartition) -> int:
        """The position after the last acknowledged record, visible or not. Raises TopicMissing."""
        ...

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        """A reader of exactly these partitions. Raises TopicMissing."""
        ...

    def writer(self, *, exclusive: str | None = None) -> Writer:
        """A writer; with a name, the only one of that name from now on (earlier: fenced)."""
        ...

    def close(self) -> None:
        """Close the bus with its readers and writers; idempotent."""
        ...
