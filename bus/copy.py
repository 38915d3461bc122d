"""Copies of topics with the same records at the same offsets.

A copy resumes per partition and ends by comparing digests. Kafka gets filler records at unused
offsets (`FILLER`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, islice, repeat
from typing import Any, Final, Protocol

from dora_pipe.bus.base import Report, polls_until
from dora_pipe.bus.blobs import BLOB_LOST, lost_blob
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.checks import FILLER, is_trimmed
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.core.errors import BusError, InvariantBroken, LogTruncated
from dora_pipe.core.pure.records import Append, Record, TopicPartition

APPENDS_AT_ONCE: Final = 4096


class CopyTarget(Protocol):
    """Log that a copy is written to."""

    bus: Bus

    def position(self, tp: TopicPartition) -> int:
        """Return the position that the copy has reached."""
        ...

    def place(self, tp: TopicPartition, records: Sequence[Record], *, begin: int, end: int) -> None:
        """Write records at their offsets and move the position to `end`.

        `begin` is the partition's start if nothing was copied yet. Raises BusError.
        """
        ...


class FileTarget:
    """Copies into a SQLite file, with large values inside the records."""

    def __init__(self, bus: SqliteBus) -> None:
        self.bus: Bus = bus
        self.position = bus.placed_end
        self.place = bus.place


class FillingTarget:
    """Copies into Kafka, which assigns offsets without gaps."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._writer = bus.writer()

    def position(self, tp: TopicPartition) -> int:
        """Return the end: copies have no gaps."""
        return self.bus.written_end(tp)

    def place(self, tp: TopicPartition, records: Sequence[Record], *, begin: int, end: int) -> None:
        if begin and not is_trimmed(tp.topic):
            raise LogTruncated(
                f"{tp.topic}/{tp.partition} begins at {begin}: earlier records were deleted, "
                "and a copy on Kafka would renumber offsets",
                hint="copy into a .sqlite file",
            )
        position = self.position(tp)
        appends = _without_gaps(tp, records, position, end)
        while chunk := list(islice(appends, APPENDS_AT_ONCE)):
            if self._writer.append(chunk) != list(range(position, position + len(chunk))):
                raise BusError(
                    f"{tp.topic}/{tp.partition} got records from another writer during the copy",
                    hint="delete the copy's topics and copy again",
                )
            position += len(chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogCopy:
    """Result of a copy; `digest` covers all records, equal on both sides."""

    records: int
    added: int
    lost: int
    """Blobs missing in the source."""
    digest: str


def copy_topics(
    source: Bus,
    target: CopyTarget,
    topics: Sequence[str],
    report: Report,
    *,
    allow_lost: bool = False,
) -> LogCopy:
    """Copy the current records of topics that exist on both sides.

    Raises BusError if the target has other records or a blob is lost (unless allowed),
    InvariantBroken if the sides differ.
    """
    # Control first: the records it references were appended before.
    ends = {
        tp: source.end(tp)
        for topic in topics
        for tp in (TopicPartition(topic, index) for index in range(source.partitions(topic)))
    }
    for tp, end in ends.items():
        _check_begins_alike(source, target, tp, end)
    copies = [_PartitionCopy(source, target, tp, end, allow_lost) for tp, end in ends.items()]
    digest = hashlib.sha256()
    for copy in copies:
        copy.run(report)
        digest.update(f"{copy.tp.topic} {copy.tp.partition} {copy.read.hexdigest()}\n".encode())
    return LogCopy(
        records=sum(copy.records for copy in copies),
        added=sum(copy.added for copy in copies),
        lost=sum(copy.lost for copy in copies),
        digest=digest.hexdigest(),
    )


class _PartitionCopy:
    def __init__(
        self, source: Bus, target: CopyTarget, tp: TopicPartition, end: int, allow_lost: bool
    ) -> None:
        self.tp, self.records, self.added, self.lost = tp, 0, 0, 0
        self.read, self._written = hashlib.sha256(), hashlib.sha256()
        self._source, self._target = source, target
        self._end, self._allow_lost = end, allow_lost

    def run(self, report: Report) -> None:
        """Copy the missing records and compare all."""
        tp, end = self.tp, self._end
        start = self._target.position(tp)
        begin = self._source.begin(tp)
        if start:  # old metrics may be deleted meanwhile, on both sides
            begin = max(begin, self._target.bus.begin(tp))
        self._read_copy(begin, start)
        checked = False
        for batch in _batches(self._source, tp, begin, end):
            copied = [record for record in batch if record.offset < start]
            new = [record for record in batch if record.offset >= start]
            self._add(copied)
            if new and not checked:
                self._check_same("is not a copy of this run", "choose another file or cluster")
                checked = True
            if new:
                self._add(new)
                records = [_without_lost(record) for record in new]
                self._target.place(tp, records, begin=begin, end=new[-1].offset + 1)
                self.added += len(new)
            report(f"copying {tp.topic}", batch[-1].offset - begin, end - begin)
        if start < end:
            self._target.place(tp, (), begin=begin, end=end)
        self._read_copy(max(begin, start), end)
        self._check_same("differs from its source", "delete the copy and copy again")

    def _add(self, records: Sequence[Record]) -> None:
        for record in records:
            if lost := lost_blob(record):
                self.lost += 1
                if not self._allow_lost:
                    raise BusError(
                        f"{self.tp.topic}/{self.tp.partition}@{record.offset}: {lost}",
                        hint="copy on a machine with the run's store, or add --allow-lost",
                    )
            update_digest(self.read, record)
        self.records += len(records)

    def _read_copy(self, begin: int, end: int) -> None:
        for batch in _batches(self._target.bus, self.tp, begin, end):
            for record in batch:
                update_digest(self._written, record)

    def _check_same(self, fault: str, hint: str) -> None:
        if self.read.digest() != self._written.digest():
            raise InvariantBroken(f"{self.tp.topic}/{self.tp.partition} {fault}", hint=hint)


def update_digest(digest: Any, record: Record) -> None:
    """Add a record to a digest, each field with its length."""
    headers = [part for name, value in _headers(record) for part in (name.encode(), value)]
    parts = (record.key, *headers, record.value)
    sizes = ",".join(str(len(part)) for part in parts)
    digest.update(f"{record.partition}@{record.offset}:{sizes}\n".encode())
    for part in parts:
        digest.update(part)


def _check_begins_alike(source: Bus, target: CopyTarget, tp: TopicPartition, end: int) -> None:
    copied = target.position(tp)
    if copied > end:
        raise BusError(
            f"{tp.topic}/{tp.partition} ends at {copied} in the copy and at {end} in its source",
            hint="check whether the source is an older log",
        )
    begin = max(source.begin(tp), target.bus.begin(tp))
    if begin >= copied:
        return
    first, copied_first = (_first(bus, tp, begin, copied) for bus in (source, target.bus))
    if first != copied_first:
        raise BusError(
            f"{tp.topic}/{tp.partition} of the target is not a copy of this run",
            hint="choose another file or cluster",
        )


def _first(bus: Bus, tp: TopicPartition, begin: int, end: int) -> Record | None:
    record = next(chain.from_iterable(_batches(bus, tp, begin, end)), None)
    return None if record is None else replace(_without_lost(record), checked="")


def _batches(bus: Bus, tp: TopicPartition, begin: int, end: int) -> Iterator[list[Record]]:
    with closing(bus.reader({tp: begin})) as reader:
        yield from filter(None, polls_until(reader, {tp: end}))


def _without_gaps(
    tp: TopicPartition, records: Sequence[Record], position: int, end: int
) -> Iterator[Append]:
    filler = Append(topic=tp.topic, partition=tp.partition, value=b"", headers=((FILLER, b""),))
    for record in records:
        yield from repeat(filler, record.offset - position)
        yield Append(
            topic=tp.topic,
            partition=tp.partition,
            key=record.key,
            value=record.value,
            headers=record.headers,
            digest=record.checked,
        )
        position = record.offset + 1
    yield from repeat(filler, end - position)


def _headers(record: Record) -> tuple[tuple[str, bytes], ...]:
    """Return the headers as appended, without the reader's ``blob-lost``."""
    return tuple(header for header in record.headers if header[0] != BLOB_LOST)


def _without_lost(record: Record) -> Record:
    return replace(record, headers=_headers(record)) if lost_blob(record) else record
