"""Bus contract for readers."""

from __future__ import annotations

import os
import threading
import time

import pytest

from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.bus_steps import (
    PATIENCE_S,
    Harness,
    appends,
    catch_up,
    checks_of,
    opened,
    read,
    read_poll,
    topic_on,
    values,
)


def offsets_increase_and_leave_gaps(harness: Harness) -> None:
    """ "Last offset + 1" must meet a gap on every bus."""
    bus, topic, partition = opened(harness)
    writer = bus.writer(exclusive=harness.topic("w"))
    offsets = [offset for i in range(5) for offset in writer.append(appends(topic, f"{i}", "b"))]
    assert offsets == sorted(set(offsets)), "offsets must increase"
    assert offsets[-1] > len(offsets) - 1, "this bus is dense: no reader learns to pass gaps"
    reader = bus.reader({partition: 0})
    assert [record.offset for record in read(reader, 10)] == offsets


def caught_up_means_position_and_not_last_offset(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    reader = bus.reader({partition: 0})
    assert (reader.position(partition), bus.begin(partition), bus.end(partition)) == (0, 0, 0)
    assert reader.poll(timeout_s=0) == []
    writer = bus.writer(exclusive=harness.topic("w"))
    for i in range(3):
        (last,) = writer.append(appends(topic, f"{i}"))
    read(reader, 3)
    assert catch_up(bus, reader, partition) == []
    assert reader.position(partition) == bus.end(partition)
    assert reader.position(partition) > last + 1, (
        "the position must pass what lies behind the last record"
    )


def headers_keys_and_values_come_back_as_they_were(harness: Harness) -> None:
    bus, topic, _ = opened(harness, partitions=2)
    headers = (("run", b"first"), ("sha256", b"0" * 64), ("run", b"again"), ("empty", b""))
    every_byte = bytes(range(256))
    given = [
        Append(topic=topic, value=every_byte, partition=1, key=b"group-7", headers=headers),
        Append(topic=topic, value=b"", partition=1),
    ]
    offsets = bus.writer().append(given)
    reader = bus.reader({TopicPartition(topic, 1): 0})
    first, second = read(reader, 2)
    assert (first.topic, first.partition, first.offset) == (topic, 1, offsets[0])
    assert (first.key, first.value, first.headers) == (b"group-7", every_byte, headers)
    assert (second.key, second.value, second.headers) == (b"", b"", ())
    assert first.at == TopicPartition(topic, 1)


def a_record_of_eight_mebibytes_passes(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    value = os.urandom(1024) * 8192
    bus.writer().append([Append(topic=topic, value=value)])
    reader = bus.reader({partition: 0})
    assert values(read(reader, 1)) == [value]


def order_is_kept_in_each_partition(harness: Harness) -> None:
    bus, topic, _ = opened(harness, partitions=3)
    writer = bus.writer()
    for i in range(20):
        call = [appends(topic, f"{i}-{j}", partition=(i + j) % 3)[0] for j in range(5)]
        assert len(writer.append(call)) == 5
    reader = bus.reader({TopicPartition(topic, p): 0 for p in range(3)})
    result = read(reader, 100)
    for partition in range(3):
        expected = [f"{i}-{j}" for i in range(20) for j in range(5) if (i + j) % 3 == partition]
        mine = [record for record in result if record.partition == partition]
        assert [record.value.decode() for record in mine] == expected
        assert [record.offset for record in mine] == sorted({record.offset for record in mine})


def an_append_of_several_topics_returns_offsets_in_the_given_order(harness: Harness) -> None:
    bus = harness.open()
    topic, two = topic_on(harness, bus), topic_on(harness, bus, partitions=2)
    writer = bus.writer(exclusive=harness.topic("w"))
    call = [*appends(topic, "a"), *appends(two, "b", partition=1), *appends(topic, "c")]
    offsets = writer.append(call)
    reader = bus.reader({TopicPartition(topic, 0): 0, TopicPartition(two, 1): 0})
    results = {record.value: record.offset for record in read(reader, 3)}
    assert offsets == [results[b"a"], results[b"b"], results[b"c"]]
    assert writer.append([]) == []


def a_poll_with_nothing_to_read_ends_at_its_deadline(harness: Harness) -> None:
    bus, _, partition = opened(harness)
    reader = bus.reader({partition: 0})
    reader.poll(timeout_s=0.1)
    began_s = time.monotonic()
    assert reader.poll(timeout_s=0.3) == []
    took_s = time.monotonic() - began_s
    assert took_s < PATIENCE_S
    assert took_s >= 0.25 or not harness.waits
    assert took_s < 0.25 or harness.waits


def a_waiting_poll_returns_when_something_comes(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    reader = bus.reader({partition: 0})
    assert reader.poll(timeout_s=0) == []
    writer = bus.writer()
    if harness.waits:
        timer = threading.Timer(0.15, writer.append, [appends(topic, "late")])
        timer.start()
        assert values(reader.poll(timeout_s=PATIENCE_S)) == [b"late"]
        timer.join()
    else:
        writer.append(appends(topic, "late"))
        assert values(reader.poll(timeout_s=PATIENCE_S)) == [b"late"]


def polls_that_never_wait_get_everything_in_the_end(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    bus.writer().append(appends(topic, *"abcdef"))
    reader = bus.reader({partition: 0})
    records: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(records) < 6 and time.monotonic() < deadline_s:
        records += reader.poll(timeout_s=0, records_max=4)
        time.sleep(0.001 if harness.waits else 0)
    assert b"".join(values(records)) == b"abcdef"


def polls_are_bounded_by_records_and_bytes(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    offsets = bus.writer().append([Append(topic=topic, value=bytes(1000)) for _ in range(10)])
    reader = bus.reader({partition: 0})
    assert len(read_poll(reader, records_max=3)) == 3
    assert reader.position(partition) == offsets[3], "what was not returned was not passed"
    assert len(read_poll(reader, bytes_max=2500)) == 2
    assert reader.position(partition) == offsets[5]
    assert len(read_poll(reader, bytes_max=10)) == 1, "one record comes back however large"
    rest = read(reader, 4)
    assert [record.offset for record in rest] == offsets[6:]


def a_reader_goes_on_from_any_position_also_inside_a_gap(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    writer = bus.writer(exclusive=harness.topic("w"))
    offsets = [writer.append(appends(topic, f"{i}"))[0] for i in range(4)]
    reader = bus.reader({partition: offsets[1] + 1})
    assert values(read(reader, 2)) == [b"2", b"3"]
    reader.seek(partition, 0)
    assert reader.position(partition) == 0
    assert values(read(reader, 4)) == [b"0", b"1", b"2", b"3"], "seeking back reads again"
    reader.seek(partition, offsets[3] + 1)
    assert catch_up(bus, reader, partition) == []
    assert reader.position(partition) == bus.end(partition)
    writer.append(appends(topic, "4"))
    assert values(read(reader, 1)) == [b"4"]


def a_seek_drops_what_was_fetched_ahead(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    offsets = bus.writer().append(appends(topic, *"abcdef"))
    reader = bus.reader({partition: 0})
    assert values(read_poll(reader, bytes_max=1)) == [b"a"]
    reader.seek(partition, offsets[4])
    assert reader.position(partition) == offsets[4]
    assert values(read(reader, 2)) == [b"e", b"f"]


def a_position_beyond_the_end_is_a_truncated_log(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    bus.writer().append(appends(topic, "a"))
    reader = bus.reader({partition: 1000})
    deadline_s = time.monotonic() + PATIENCE_S
    with pytest.raises(LogTruncated):
        while time.monotonic() < deadline_s:
            assert reader.poll(timeout_s=0.2) == []
            assert harness.waits, "a bus without time must say so at the first poll"
    with pytest.raises(BusError):
        reader.seek(partition, -1)
    reader.seek(partition, 0)
    assert values(read(reader, 1)) == [b"a"]


def readers_do_not_disturb_each_other(harness: Harness) -> None:
    bus, other = harness.open(), harness.open()
    topic = topic_on(harness, bus, partitions=2)
    partition = TopicPartition(topic, 0)
    reader, two = (
        bus.reader({partition: 0}),
        other.reader({partition: 0, TopicPartition(topic, 1): 0}),
    )
    bus.writer().append(appends(topic, "a", "b"))
    assert values(read(reader, 2)) == [b"a", b"b"]
    bus.writer().append(appends(topic, "c"))
    assert values(read(two, 3)) == [b"a", b"b", b"c"]
    assert values(read(reader, 1)) == [b"c"]
    with pytest.raises(BusError):
        reader.position(TopicPartition(topic, 1))


def readers_know_that_they_are_held_back(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    reader, writer = bus.reader({partition: 0}), bus.writer()
    writer.append(appends(topic, "before"))
    assert values(read(reader, 1)) == [b"before"]
    assert catch_up(bus, reader, partition) == []
    assert (reader.held_back(), bus.written_end(partition)) == ([], bus.end(partition))
    end = harness.leave_open(topic)
    writer.append(appends(topic, "behind"))
    written = bus.written_end(partition)
    if end is not None:
        deadline_s = time.monotonic() + PATIENCE_S
        while reader.held_back() != [partition]:
            assert reader.poll(timeout_s=0.1) == []
            assert time.monotonic() < deadline_s, "it reads on and never hears that there is more"
        assert reader.position(partition) <= bus.end(partition) < written
        end()
    records: list[Record] = []
    while reader.position(partition) < written:
        records += reader.poll(timeout_s=0.1)
    assert values(records)[-1] == b"behind"
    assert catch_up(bus, reader, partition) == []
    assert (reader.held_back(), bus.written_end(partition)) == ([], bus.end(partition))


CHECKS = checks_of(globals())
