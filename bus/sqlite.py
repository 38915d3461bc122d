"""The log in one SQLite file, shared by the processes of one machine.

Row number = topic << 52 | partition << 40 | offset; the row of offset 0 is the *base* of a
partition. One offset is unused after each append, so the end is the last offset + 2: never delete
the last row.

Readers poll `PRAGMA data_version` (3 us) and sleep longer on a quiet log.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from dora_pipe.bus.base import PositionReader
from dora_pipe.bus.bus import Bus, TopicSpec, Writer
from dora_pipe.bus.checks import (
    check_appends,
    check_exists,
    check_not_truncated,
    check_position,
    check_same,
    check_spec,
    check_trimmed,
    first_kept,
    is_trimmed,
)
from dora_pipe.bus.sqlite_file import SqliteFile
from dora_pipe.core.errors import BusError, BusFull, Fenced, OutcomeUnknown, TopicMissing
from dora_pipe.core.pure.records import Append, Record, TopicPartition

OFFSET_BITS = 40
PARTITION_BITS = 12
STEP = 2
"""Difference between the last offset of an append and the next offset."""

TRIM_OFFSETS = 1000
"""Maximum per transaction, which blocks appends."""

TOPICS_MAX = 2047
"""Maximum of a row number's topic bits."""

WAIT_S_MAX = 0.050
"""Longest sleep of a waiting reader, and so its delay."""

WAIT_S_MIN = 0.001

WAIT_SHARE = 4
"""Sleep a quarter of the quiet time."""

_FIRST = "SELECT at FROM records WHERE at >= ? AND at < ? ORDER BY at LIMIT 1"
_LAST = "SELECT at FROM records WHERE at >= ? AND at < ? ORDER BY at DESC LIMIT 1"
_DELETE = "DELETE FROM records WHERE at >= ? AND at < ?"
_INSERT = "INSERT INTO records (at, key, headers, value) VALUES (?, ?, ?, ?)"
_PLACED = "INSERT OR REPLACE INTO placed (base, from_offset, to_offset) VALUES (?, ?, ?)"
_RANGE = "SELECT at, key, headers, value FROM records WHERE at >= ? AND at < ? ORDER BY at LIMIT ?"
_FENCE = (
    "INSERT INTO writers VALUES (?, 1) ON CONFLICT DO UPDATE SET epoch = epoch + 1 RETURNING epoch"
)

_encode_headers = msgspec.msgpack.Encoder().encode
_decode_headers = msgspec.msgpack.Decoder(tuple[tuple[str, bytes], ...]).decode


class _Topics:
    def __init__(self) -> None:
        self.specs: dict[str, TopicSpec] = {}
        self._ids: dict[str, int] = {}

    def load(self, file: SqliteFile) -> None:
        for number, name, partitions, max_record_bytes in file.rows("SELECT * FROM topics"):
            self._ids[name] = number
            self.specs[name] = TopicSpec(
                name=name, partitions=partitions, max_record_bytes=max_record_bytes
            )

    def base(self, topic: str, partition: int) -> int:
        return (self._ids[topic] << PARTITION_BITS | partition) << OFFSET_BITS


class SqliteBus(Bus):
    """The log in one file, which the first `create` creates."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file: SqliteFile | None = None
        self._parts: set[SqliteFile] = set()
        self._topics = _Topics()
        self._closed = False

    def create(self, topics: Sequence[TopicSpec]) -> None:
        for spec in topics:
            check_spec(spec)
        file = self._open(create=True)
        assert file is not None
        with file.writing() as connection:
            for spec in topics:
                cursor = connection.execute("SELECT * FROM topics WHERE name = ?", (spec.name,))
                if (row := cursor.fetchone()) is not None:
                    check_same(
                        spec, TopicSpec(name=row[1], partitions=row[2], max_record_bytes=row[3])
                    )
                    continue
                values = (spec.name, spec.partitions, spec.max_record_bytes)
                connection.execute("INSERT INTO topics VALUES (NULL, ?, ?, ?)", values)
            if file.one("SELECT max(id) FROM topics") > TOPICS_MAX:
                raise BusError(f"{self.path} cannot hold more than {TOPICS_MAX} topics")

    def topics(self) -> list[str]:
        file = self._open()
        if file is not None:
            self._topics.load(file)
        return sorted(self._topics.specs)

    def partitions(self, topic: str) -> int:
        return self._find(TopicPartition(topic, 0)).partitions

    def begin(self, tp: TopicPartition) -> int:
        """Return the first offset that `trim` or a copy's source left, else 0."""
        file = self._file_of(tp)
        base = self._topics.base(*tp)
        copied, _ = file.placed.get(base, (0, 0))
        if not is_trimmed(tp.topic):
            return copied
        with file.reading():
            first = file.one(_FIRST, (base, base + (1 << OFFSET_BITS)))
        return copied if first is None else max(copied, int(first) - base)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Delete in one short transaction."""
        file = self._file_of(tp)
        check_trimmed(tp)
        check_position(tp, before)
        with file.writing():
            return _trim(file, self._topics.base(*tp), before)

    def end(self, tp: TopicPartition) -> int:
        file = self._file_of(tp)
        with file.reading():
            return _end_of(file, self._topics.base(*tp))

    def written_end(self, tp: TopicPartition) -> int:
        return self.end(tp)

    def placed_end(self, tp: TopicPartition) -> int:
        """Return the position after the last record, without the gap."""
        file = self._file_of(tp)
        base = self._topics.base(*tp)
        with file.reading():
            last = _last(file, base)
            _, copied = file.placed.get(base, (0, 0))
            return copied if last is None else max(copied, last - base + 1)

    def place(self, tp: TopicPartition, records: Sequence[Record], *, begin: int, end: int) -> None:
        """Write another log's records at their offsets durably, and end the partition at `end`.

        `begin` matters only in the first call. Raises BusError.
        """
        file = self._file_of(tp)
        base = self._topics.base(*tp)
        begin, _ = file.placed.get(base, (begin, 0))
        with file.writing() as connection:
            last = _last(file, base)
            if records and last is not None and records[0].offset <= last - base:
                raise BusError(f"{self.path} is written by another process during the copy")
            connection.executemany(
                _INSERT,
                [
                    (
                        base + record.offset,
                        record.key,
                        _encode_headers(record.headers) if record.headers else None,
                        record.value,
                    )
                    for record in records
                ],
            )
            connection.execute(_PLACED, (base, begin, end))
        file.placed[base] = begin, end

    def reader(self, positions: Mapping[TopicPartition, int]) -> SqliteReader:
        for tp, position in positions.items():
            self._find(tp)
            check_position(tp, position)
        bases = {tp: self._topics.base(*tp) for tp in positions}
        return SqliteReader(self._part(patient=True), bases, positions)

    def writer(self, *, exclusive: str | None = None) -> SqliteWriter:
        if self._open() is None:
            raise TopicMissing(f"there is no log at {self.path}")
        return SqliteWriter(self._part(patient=False), exclusive)

    def close(self) -> None:
        self._closed = True
        for part in self._parts:
            part.close()
        self._parts.clear()
        if self._file is not None:
            self._file.close()

    def _part(self, *, patient: bool) -> SqliteFile:
        self._parts = {part for part in self._parts if not part.closed}
        part = SqliteFile(self.path, patient=patient)
        self._parts.add(part)
        return part

    def _open(self, *, create: bool = False) -> SqliteFile | None:
        if self._closed:
            raise BusError("this bus is closed")
        if self._file is None and (create or self.path.exists()):
            file = SqliteFile(self.path, create=create)
            if file.fresh:
                file.close()
                return None
            self._file = file
        return self._file

    def _file_of(self, tp: TopicPartition) -> SqliteFile:
        self._find(tp)
        assert self._file is not None
        return self._file

    def _find(self, tp: TopicPartition) -> TopicSpec:
        file = self._open()
        if file is not None and tp.topic not in self._topics.specs:
            self._topics.load(file)
        return check_exists(tp, self._topics.specs)


class SqliteReader(PositionReader):
    """Reader with its own connection; holds no transaction between polls."""

    def __init__(
        self,
        file: SqliteFile,
        bases: Mapping[TopicPartition, int],
        positions: Mapping[TopicPartition, int],
    ) -> None:
        super().__init__(positions, file.check_usable)
        self._file = file
        self._bases = bases
        self._at_end: set[TopicPartition] = set()
        """Partitions whose position is past the gap after the last record."""
        self._turn = 0
        self._version = 0
        self._more = True
        self._active_s = time.monotonic()

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        deadline_s = time.monotonic() + timeout_s
        while True:
            records = self._read(records_max, bytes_max)
            now_s = time.monotonic()
            if records:
                self._active_s = now_s
            if records or now_s >= deadline_s:
                return records
            quiet_s = (now_s - self._active_s) / WAIT_SHARE
            time.sleep(min(max(WAIT_S_MIN, min(quiet_s, WAIT_S_MAX)), deadline_s - now_s))

    def _read(self, records_max: int, bytes_max: int) -> list[Record]:
        """Return new records; skip the read if nothing was committed."""
        self._file.check_usable()
        with self._file.errors():
            version = self._file.one("PRAGMA data_version")
        if version == self._version and not self._more:
            return []
        records: list[Record] = []
        room_bytes = bytes_max
        self._turn += 1
        tps = list(self._bases)
        turn = self._turn % max(1, len(tps))  # do not starve a partition
        with self._file.reading() as connection:
            for tp in tps[turn:] + tps[:turn]:
                room_bytes -= self._take(connection, tp, records, records_max, room_bytes)
        self._version = version
        self._more = len(self._at_end) < len(tps)
        return records

    def _take(
        self,
        connection: sqlite3.Connection,
        tp: TopicPartition,
        records: list[Record],
        records_max: int,
        room_bytes: int,
    ) -> int:
        limit, base = records_max - len(records), self._bases[tp]
        if base in self._file.placed:
            begin, _ = self._file.placed[base]
            self._positions[tp] = first_kept(tp, self._positions[tp], begin)
        bounds = (base + self._positions[tp], base + (1 << OFFSET_BITS), limit)
        taken_bytes = taken = 0
        with closing(connection.execute(_RANGE, bounds)) as rows:
            for row, key, headers, value in rows:
                self._at_end.discard(tp)
                size_bytes = len(key) + len(value) + len(headers or b"")
                if records and taken_bytes + size_bytes > room_bytes:
                    return taken_bytes
                records.append(_record(tp, row - base, key, headers, value))
                taken_bytes += size_bytes
                taken += 1
                self._positions[tp] = row - base + 1
        if taken == limit:
            self._at_end.discard(tp)
        elif tp not in self._at_end:
            end = _end_of(self._file, base)
            check_not_truncated(tp, self._positions[tp], end)
            self._positions[tp] = end
            self._at_end.add(tp)
        return taken_bytes

    def seek(self, tp: TopicPartition, position: int) -> None:
        super().seek(tp, position)
        self._at_end.discard(tp)
        self._more = True

    def close(self) -> None:
        self._file.close()


class SqliteWriter(Writer):
    """Writer with its own connection; each append is one transaction."""

    def __init__(self, file: SqliteFile, exclusive: str | None) -> None:
        self._file = file
        self._name = exclusive
        self._topics = _Topics()
        self._broken = False
        if exclusive is not None:
            with file.writing():
                self._epoch = file.one(_FENCE, (exclusive,))

    def append(self, records: Sequence[Append]) -> list[int]:
        self._file.check_usable()
        if self._broken:
            raise BusError("this exclusive writer lost track of its appends; open a new one")
        if any(record.topic not in self._topics.specs for record in records):
            self._topics.load(self._file)
        check_appends(records, self._topics.specs)
        headers = [_encode_headers(each.headers) if each.headers else None for each in records]
        bases = [self._topics.base(each.topic, each.partition) for each in records]
        try:
            with self._file.writing() as connection:
                self._check_epoch()
                rows = self._number(bases)
                packed = zip(rows, records, headers, strict=True)
                connection.executemany(
                    _INSERT, [(row, each.key, head, each.value) for row, each, head in packed]
                )
        except OutcomeUnknown:
            self._broken = self._name is not None
            raise
        return [row - base for row, base in zip(rows, bases, strict=True)]

    def _check_epoch(self) -> None:
        if self._name is None:
            return
        epoch = self._file.one("SELECT epoch FROM writers WHERE name = ?", (self._name,))
        if epoch != self._epoch:
            raise Fenced(f"a newer writer {self._name} took over (epoch {epoch})")

    def _number(self, bases: Iterable[int]) -> list[int]:
        following: dict[int, int] = {}
        rows = []
        for base in bases:
            row = following.get(base)
            if row is None:
                row = base + _end_of(self._file, base)
            if row - base >> OFFSET_BITS:
                raise BusFull(f"a partition of {self._file.path} has no offsets left")
            rows.append(row)
            following[base] = row + 1
        return rows

    def close(self) -> None:
        self._file.close()


def _record(
    tp: TopicPartition, offset: int, key: bytes, headers: bytes | None, value: bytes
) -> Record:
    return Record(
        topic=tp.topic,
        partition=tp.partition,
        offset=offset,
        key=key,
        value=value,
        headers=_decode_headers(headers) if headers else (),
    )


def _end_of(file: SqliteFile, base: int) -> int:
    """Return the end with the gap, or the source's end in a copy."""
    last = _last(file, base)
    _, copied = file.placed.get(base, (0, 0))
    if last is None or last - base < copied:
        return copied
    return last - base + STEP


def _trim(file: SqliteFile, base: int, before: int) -> bool:
    last = _last(file, base)
    if last is None:
        return False
    limit = min(base + before, last)
    first = file.one(_FIRST, (base, limit))
    if first is None:
        return False
    until = min(limit, int(first) + TRIM_OFFSETS)
    file.connection.execute(_DELETE, (first, until))
    return until < limit


def _last(file: SqliteFile, base: int) -> int | None:
    row = file.one(_LAST, (base, base + (1 << OFFSET_BITS)))
    return None if row is None else int(row)


def unreadable_records(path: Path) -> list[str]:
    """Return a line for every unknown topic id and out-of-range partition with records.

    Raises BusError.
    """
    beyond = (1 << 63) - (1 << OFFSET_BITS)  # the last partition that SQLite can number
    with closing(SqliteFile(path)) as file, file.errors():
        rows = file.connection.execute("SELECT id, name, partitions FROM topics").fetchall()
        topics = {topic_id: (name, partitions) for topic_id, name, partitions in rows}
        lines: list[str] = []
        row = file.one("SELECT min(at) FROM records")
        while row is not None and row < beyond:
            topic, partition = divmod(row >> OFFSET_BITS, 1 << PARTITION_BITS)
            name, partitions = topics.get(topic, ("", 0))
            if not name:
                lines.append(f"records have topic id {topic}, which the log does not define")
            elif partition >= partitions:
                lines.append(
                    f"records are in partition {partition} of {name}, which has {partitions}"
                )
            after = (row >> OFFSET_BITS) + 1 << OFFSET_BITS
            row = file.one("SELECT min(at) FROM records WHERE at >= ?", (after,))
        return lines
