"""The part of the bus contract that says what may be deleted, and what its readers see of it."""

from __future__ import annotations

import pytest

from dora_pipe.bus.port import Bus, TopicPartition, TopicSpec
from dora_pipe.core.errors import BusError
from tests.support.bus_steps import Check, Harness, appends, catch_up, read, topic_on, values

CALLS_MAX = 100


def trimmed_on(harness: Harness, bus: Bus) -> TopicPartition:
    """The first of two partitions of a fresh topic that may be trimmed."""
    name = f"{harness.topic('t')}.metrics"
    bus.create([TopicSpec(name=name, partitions=2)])
    return TopicPartition(name, 0)


def trim_all(bus: Bus, at: TopicPartition, before: int) -> int:
    """Trim until there is no more to delete; the calls that it took."""
    calls = 1
    while bus.trim(at, before):
        calls += 1
        assert calls < CALLS_MAX, "it never says that all is deleted"
    return calls


def what_is_left_of_a_trimmed_topic_is_as_it_was(harness: Harness) -> None:
    bus = harness.open()
    at = trimmed_on(harness, bus)
    writer = bus.writer()
    offsets = [writer.append(appends(at.topic, f"{i}"))[0] for i in range(6)]
    writer.append(appends(at.topic, "other", partition=1))
    end = bus.end(at)
    early = bus.reader({at: offsets[1]})
    trim_all(bus, at, offsets[3])
    assert (bus.begin(at), bus.end(at), bus.written_end(at)) == (offsets[3], end, end)
    for reader in (early, bus.reader({at: 0}), harness.open().reader({at: offsets[2]})):
        found = read(reader, 3)
        assert [record.offset for record in found] == offsets[3:]
        assert values(found) == [b"3", b"4", b"5"]
        assert catch_up(bus, reader, at) == []
    trim_all(bus, at, offsets[1])
    assert bus.begin(at) == offsets[3], "nothing comes back"
    assert writer.append(appends(at.topic, "6"))[0] >= end, "no offset is given twice"
    assert values(read(bus.reader({TopicPartition(at.topic, 1): 0}), 1)) == [b"other"]


def a_topic_that_is_trimmed_to_its_end_goes_on_there(harness: Harness) -> None:
    bus = harness.open()
    at = trimmed_on(harness, bus)
    writer = bus.writer()
    assert not bus.trim(at, 0), "there is nothing to delete"
    offsets = [writer.append(appends(at.topic, f"{i}", "b"))[0] for i in range(3)]
    end = bus.end(at)
    trim_all(bus, at, end)
    assert offsets[2] <= bus.begin(at) <= end == bus.end(at)
    reader = bus.reader({at: 0})
    assert len(catch_up(bus, reader, at)) <= 1, "the very last record may stay"
    assert reader.position(at) == bus.end(at)
    (offset,) = writer.append(appends(at.topic, "new"))
    assert offset >= end
    found = read(reader, 1)
    assert [(record.offset, record.value) for record in found] == [(offset, b"new")]


def a_long_beginning_goes_in_bounded_pieces(harness: Harness) -> None:
    bus = harness.open()
    at = trimmed_on(harness, bus)
    texts = [f"{i}" for i in range(2500)]
    offsets = bus.writer().append(appends(at.topic, *texts))
    begins = [bus.begin(at)]
    while bus.trim(at, offsets[2400]):
        begins.append(bus.begin(at))
        assert len(begins) < CALLS_MAX
    assert begins == sorted(set(begins)), "every call deletes something"
    assert bus.begin(at) == offsets[2400]
    assert values(read(bus.reader({at: 0}), 100)) == [text.encode() for text in texts[2400:]]


def what_a_run_rests_on_cannot_be_trimmed(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    offsets = bus.writer().append(appends(topic, "a", "b"))
    with pytest.raises(BusError, match="must be kept"):
        bus.trim(at, offsets[1])
    assert values(read(bus.reader({at: 0}), 2)) == [b"a", b"b"]
    with pytest.raises(BusError):
        bus.trim(TopicPartition(f"{harness.topic('none')}.metrics", 0), 1)


CHECKS: list[Check] = [
    what_is_left_of_a_trimmed_topic_is_as_it_was,
    a_topic_that_is_trimmed_to_its_end_goes_on_there,
    a_long_beginning_goes_in_bounded_pieces,
    what_a_run_rests_on_cannot_be_trimmed,
]
