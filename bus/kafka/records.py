"""From what a broker has answered to records: batches taken apart where they were received.

The client unpacks a record with a call for every number in it and every header's size, and makes a
record of its own that we would unpack again: together more than half of what reading costs. It also
copies every batch before it looks at it. What is checked here is the same: the batch's CRC, every
length, aborted transactions and control batches.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kafka import errors as kafka_errors
from kafka.consumer.fetcher import Fetcher
from kafka.protocol.consumer import IsolationLevel
from kafka.record.default_records import DefaultRecordBatch

from dora_pipe.bus.checks import FILLER, record_bytes
from dora_pipe.bus.port import Record, TopicPartition

SHOWN_BYTES_MIN: Final = 16 * 1024
"""Of a record, on average: a batch of such ones is not copied as a whole before it is unpacked."""

NEWEST_MAGIC: Final = 2
"""The only format of batches that is read."""

LAYOUTS_MAX: Final = 512

LAYOUT_BYTES_MAX: Final = 2048
"""Shapes of headers that are remembered; a trajectory's are some 600 bytes."""

Headers = tuple[tuple[str, bytes], ...]
Data = bytes | bytearray | memoryview

_VARINT_BITS_MAX: Final = 64


@dataclass(slots=True)
class ByteCount:
    """Bytes that a consumer unpacked since it began: what a record takes in its batch, which is
    not less than `record_bytes` of it."""

    bytes: int = 0


class Unpacked(Fetcher.PartitionRecords):  # type: ignore[misc]  # the client has no types
    """What came of one partition in one answer: an iterator of `Record`."""

    def __init__(self, *arguments: Any, count: ByteCount, **named: Any) -> None:
        self._unpacked = count
        super().__init__(*arguments, **named)

    def _unpack_records(self, tp: Any, records: Any, *_: Any) -> Iterator[Record]:
        last = None
        while (batch := next_batch(records)) is not None:
            last = batch
            if not batch.validate_crc():
                raise kafka_errors.CorruptRecordError(
                    f"the batch at {tp.topic}/{tp.partition}@{batch.base_offset} fails its CRC"
                )
            if not isinstance(batch, DefaultRecordBatch):
                raise kafka_errors.UnsupportedVersionError(
                    f"{tp.topic}/{tp.partition}@{batch.base_offset} is of an old format"
                )
            self.leader_epoch = batch.leader_epoch
            if self._is_skipped(batch):
                self.next_fetch_offset = batch.next_offset
                continue
            for record, size_bytes in unpacked(batch, tp.topic, tp.partition):
                self.bytes_read += size_bytes
                self._unpacked.bytes += size_bytes
                self.next_fetch_offset = record.offset + 1
                if not (record.headers and record.headers[0][0] == FILLER):
                    yield record
        if last is not None:  # compaction keeps the last offset of a batch without its record
            self.next_fetch_offset = last.next_offset
        self.drain()

    def _is_skipped(self, batch: DefaultRecordBatch) -> bool:
        """Markers, and what readers of committed records do not see."""
        if self.isolation_level == IsolationLevel.READ_COMMITTED and batch.has_producer_id():
            self._consume_aborted_transactions_up_to(batch.last_offset)
            if self._contains_abort_marker(batch):
                self.aborted_producer_ids.discard(batch.producer_id)
            elif self._is_batch_aborted(batch):
                return True
        return bool(batch.is_control_batch)


class ShownBatch(DefaultRecordBatch):  # type: ignore[misc]  # the client has no types
    """A batch that lies where it was received; the client copies it before it looks at it."""

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(buffer[: self.HEADER_STRUCT.size])
        self._buffer = buffer


class Fetched:
    """Records that came over the bounds of one poll, kept for the next, in order."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int], deque[Record]] = {}
        """By partition, none empty."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def take(self, came: Sequence[Record], *, records_max: int, bytes_max: int) -> list[Record]:
        """What the bounds allow of those kept and those that came behind them; at least one."""
        for one in came:
            at = one.topic, one.partition
            if at not in self._kept:
                self._kept[at] = deque()
            self._kept[at].append(one)
        found: list[Record] = []
        for at in list(self._kept):
            waiting = self._kept[at]
            while waiting and len(found) < records_max:
                bytes_max -= record_bytes(waiting[0])
                if found and bytes_max < 0:
                    return found
                found.append(waiting.popleft())
            if waiting:
                break
            del self._kept[at]
        return found

    def first(self, tp: TopicPartition) -> int | None:
        """The offset of the first record kept of a partition."""
        waiting = self._kept.get(tp)
        return waiting[0].offset if waiting else None

    def forget(self, tp: TopicPartition) -> None:
        self._kept.pop(tp, None)


def next_batch(records: Any) -> Any:
    """The next of an answer's batches; those of old formats and broken ones are the client's."""
    shown = records._next_slice
    if shown is None or len(shown) < DefaultRecordBatch.HEADER_STRUCT.size:
        return records.next_batch()
    if shown[records.MAGIC_OFFSET] != NEWEST_MAGIC:
        return records.next_batch()
    records._cache_next()
    return ShownBatch(shown)


def unpacked(batch: DefaultRecordBatch, topic: str, partition: int) -> Iterator[tuple[Record, int]]:
    """The records of a batch whose CRC holds, and the bytes that each takes in it.

    Raises CorruptRecordError where lengths do not fit together.
    """
    batch._maybe_uncompress()
    data, at = batch._buffer, batch._pos
    if len(data) < SHOWN_BYTES_MIN * batch.records_count:
        data = bytes(data)  # its numbers are read faster
    base = batch.base_offset
    try:
        for _ in range(batch.records_count):
            length, start = _varint(data, at)
            end = start + length
            if length < 0 or end > len(data):
                raise ValueError(f"a record of {length} bytes")
            _, at = _varint(data, start + 1)  # attributes are one byte, then comes the time
            delta, at = _varint(data, at)
            if not 0 <= delta <= batch.last_offset_delta:  # a reader would come back to it
                raise ValueError(f"a record at {base + delta}")
            key, at = _bytes(data, at)
            value, at = _bytes(data, at)
            headers, at = _headers(data, at, end), end
            yield (
                Record(
                    topic=topic,
                    partition=partition,
                    offset=base + delta,
                    key=key,
                    value=value,
                    headers=headers,
                ),
                length,
            )
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes behind its last record")
    except (ValueError, IndexError) as error:
        raise kafka_errors.CorruptRecordError(
            f"the batch at {topic}/{partition}@{base} is none: {error}"
        ) from error


class _Layout:
    """Where names and values lie in headers of one shape: one call then takes them all apart."""

    __slots__ = ("_glue", "_names", "_parts")

    def __init__(self, block: bytes, spans: list[tuple[str, int, int]]) -> None:
        """`spans` are names, and where their values begin and end in the block."""
        parts, glue, at = [], [], 0
        for _, start, end in spans:
            parts.append(f"{start - at}s{end - start}s")
            glue.append(block[at:start])
            at = end
        self._names = tuple(name for name, _, _ in spans)
        self._glue = tuple(glue)
        self._parts = struct.Struct("".join(parts))

    def headers(self, data: Data, at: int) -> Headers | None:
        """The headers from there, if they are of this shape: same names, same lengths."""
        parts = self._parts.unpack_from(data, at)
        if parts[::2] != self._glue:
            return None
        return tuple(zip(self._names, parts[1::2], strict=True))


_layouts: dict[int, _Layout] = {}
"""By the bytes of all headers of a record; the first shape that was met of each."""


def _headers(data: Data, at: int, end: int) -> Headers:
    """The headers that lie from `at` to `end`: most are of a shape that was met before."""
    layout = _layouts.get(end - at)
    found = layout.headers(data, at) if layout else None
    if found is not None:
        return found
    spans = _spans(data, at, end)
    if layout is None and spans and len(_layouts) < LAYOUTS_MAX and end - at <= LAYOUT_BYTES_MAX:
        inside = [(name, start - at, stop - at) for name, start, stop in spans]
        _layouts[end - at] = _Layout(bytes(data[at:end]), inside)
    return tuple((name, bytes(data[start:stop])) for name, start, stop in spans)


def _spans(data: Data, at: int, end: int) -> list[tuple[str, int, int]]:
    """Of each header the name, and where its value begins and ends; null is empty here."""
    count, at = _varint(data, at)
    if not 0 <= count <= end - at:
        raise ValueError(f"{count} headers")
    found = []
    for _ in range(count):
        size, at = _varint(data, at)
        if size < 0:
            raise ValueError("a header without a name")
        name = bytes(data[at : at + size]).decode()
        size, at = _varint(data, at + size)
        found.append((name, at, at + max(0, size)))
        at += max(0, size)
    if at != end:
        raise ValueError(f"headers end at {at} and not at {end}")
    return found


def _bytes(data: Data, at: int) -> tuple[bytes, int]:
    """A key or a value; one that is absent is empty here."""
    size, at = _varint(data, at)
    if size <= 0:
        return b"", at
    return bytes(data[at : at + size]), at + size


def _varint(data: Data, at: int) -> tuple[int, int]:
    """A zigzag number of at most 64 bits, and where it ends. Raises ValueError, IndexError."""
    found = data[at]
    at += 1
    if found & 0x80:
        found &= 0x7F
        shift = 7
        while True:
            part = data[at]
            at += 1
            found |= (part & 0x7F) << shift
            if not part & 0x80:
                break
            shift += 7
            if shift >= _VARINT_BITS_MAX:
                raise ValueError("a number beyond 64 bits")
    return (found >> 1) ^ -(found & 1), at
