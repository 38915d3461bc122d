"""Batches as the client writes them, unpacked by us: the same records, and nothing else breaks."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import TopicPartition as KafkaPartition
from kafka import errors as kafka_errors
from kafka.consumer.fetcher import Fetcher
from kafka.protocol.consumer import IsolationLevel
from kafka.record import MemoryRecords
from kafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from kafka.record.util import calc_crc32c

from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.kafka import records as kafka_records
from dora_pipe.bus.kafka.records import ByteCount, Unpacked
from dora_pipe.bus.port import Record, TopicPartition

AT = KafkaPartition("t", 3)
BODY = DefaultRecordBatch.HEADER_STRUCT.size

Raw = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Key, value and headers, as others may write them."""

names = st.text(max_size=70)
values = st.none() | st.binary(max_size=200)
raws = st.tuples(values, values, st.lists(st.tuples(names, values), max_size=4))


def batch_of(records: Sequence[Raw], base: int = 0) -> bytes:
    """One batch with a valid CRC, from the client's own writer."""
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        batch_size=1 << 30,
    )
    for number, (key, value, headers) in enumerate(records):
        builder.append(number, 1_790_000_000_000 + number, key, value, headers)
    made = bytearray(builder.build())
    struct.pack_into(">q", made, 0, base)
    return bytes(made)


def sealed(batch: bytes) -> bytes:
    """The batch with the CRC that its bytes have now."""
    made = bytearray(batch)
    crc = calc_crc32c(memoryview(made)[DefaultRecordBatch.ATTRIBUTES_OFFSET :])
    struct.pack_into(">I", made, DefaultRecordBatch.CRC_OFFSET, crc)
    return bytes(made)


def read(
    data: bytes, *, start: int = 0, count: ByteCount | None = None, large: bool = False
) -> list[Record]:
    """Everything from `start` on; `large`: as records are read that are too large to be copied."""
    with pytest.MonkeyPatch.context() as patch:
        if large:
            patch.setattr(kafka_records, "SHOWN_BYTES_MIN", 0)
        return _read(data, start, count)


def _read(data: bytes, start: int, count: ByteCount | None) -> list[Record]:
    part = Unpacked(
        start,
        AT,
        MemoryRecords(data),
        isolation_level=IsolationLevel.READ_COMMITTED,
        count=count or ByteCount(),
    )
    found: list[Record] = part.take(None)
    part._maybe_raise_next_inline_exception()
    assert part.next_fetch_offset > (found[-1].offset if found else -1)
    return found


def ours(record: Any) -> Record:
    """A record of the client's as the port has it: what is absent is empty."""
    return Record(
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        key=record.key or b"",
        value=record.value or b"",
        headers=tuple((name, value or b"") for name, value in record.headers),
    )


@given(st.lists(raws, min_size=1, max_size=5), st.integers(0, 1 << 40), st.booleans())
def test_records_are_those_that_the_client_itself_reads(
    records: list[Raw], base: int, large: bool
) -> None:
    data = batch_of(records, base) + batch_of(records, base + len(records))
    client = Fetcher.PartitionRecords(
        base, AT, MemoryRecords(data), isolation_level=IsolationLevel.READ_COMMITTED
    )
    count = ByteCount()
    found = read(data, start=base, count=count, large=large)
    assert found == [ours(one) for one in client.take(None)]
    plain = [each for one in found for each in (one.key, one.value, *dict(one.headers).values())]
    assert {type(each) for each in plain} == {bytes}
    assert found[0].at == TopicPartition("t", 3)
    assert sum(map(record_bytes, found)) <= count.bytes


@given(
    st.lists(raws, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4),
    st.booleans(),
)
def test_a_damaged_batch_is_one_error_or_records_and_never_something_else(
    records: list[Raw], changes: list[tuple[int, int]], large: bool
) -> None:
    """Somebody may write anything behind a valid CRC."""
    made = bytearray(batch_of(records))
    for place, byte in changes:
        made[BODY + place % (len(made) - BODY)] = byte
    try:
        found = read(sealed(bytes(made)), large=large)
    except kafka_errors.CorruptRecordError:
        return
    assert len(found) <= len(records)


@pytest.mark.parametrize("extra", [b"", b"\x00"])
def test_a_batch_that_fails_its_crc_or_has_more_in_it_is_refused(extra: bytes) -> None:
    made = bytearray(batch_of([(b"k", b"value", [])]) + extra)
    struct.pack_into(">i", made, 8, len(made) - DefaultRecordBatch.AFTER_LEN_OFFSET)
    made[-1] ^= 0 if extra else 1
    with pytest.raises(kafka_errors.CorruptRecordError):
        read(sealed(bytes(made)) if extra else bytes(made))


def test_headers_of_one_shape_are_taken_apart_at_once_and_others_one_by_one() -> None:
    """The same bytes in all, other lengths: what was remembered of the first fits none of them."""
    shapes = [
        [("name", b"12"), ("b", b"345")],
        [("name", b"78"), ("b", b"901")],
        [("name", b"123"), ("b", b"45")],
        [("nam", b"123"), ("be", b"45")],
        [("name", b"12"), ("c", b"345")],
        [("n", b"1234567890")],
    ]
    found = read(batch_of([(b"", b"v", list(shape)) for shape in shapes]))
    assert [list(one.headers) for one in found] == shapes


def test_what_is_remembered_of_headers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kafka_records, "_layouts", {})
    monkeypatch.setattr(kafka_records, "LAYOUTS_MAX", 3)
    records: list[Raw] = [(b"", b"v", [("h", b"x" * size)]) for size in (*range(9), 5000)]
    assert [len(one.headers[0][1]) for one in read(batch_of(records))] == [*range(9), 5000]
    assert len(kafka_records._layouts) == 3


def test_a_batch_is_looked_at_where_it_was_received() -> None:
    data = batch_of([(b"k", bytes(40_000), [("h", b"1")])] * 2)
    batch = kafka_records.next_batch(MemoryRecords(data))
    assert batch._buffer.obj is data
    assert batch.validate_crc()
    found = [record.value for record, _ in kafka_records.unpacked(batch, "t", 0)]
    assert found == [bytes(40_000)] * 2


def test_a_fetch_that_begins_inside_a_batch_gives_only_what_is_behind() -> None:
    data = batch_of([(b"", bytes([number]), []) for number in range(5)])
    assert [one.offset for one in read(data, start=3)] == [3, 4]
