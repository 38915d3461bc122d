"""Bus contract for writers, open and close, and deletion; `CHECKS` is the entire contract.

A check raises AssertionError. Checks are functions, so that tests also run them on broken buses.
"""

from __future__ import annotations

import pytest

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.core.errors import (
    BusError,
    Fenced,
    OutcomeUnknown,
    RecordTooLarge,
    TopicMissing,
)
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support import bus_checks_reading
from tests.support.bus_steps import (
    Check,
    Harness,
    appends,
    catch_up,
    checks_of,
    opened,
    read,
    topic_on,
    values,
)


def a_newer_exclusive_writer_fences_the_older_one(harness: Harness) -> None:
    bus, other = harness.open(), harness.open()
    topic = topic_on(harness, bus)
    partition, name = TopicPartition(topic, 0), harness.topic("w")
    old = bus.writer(exclusive=name)
    stranger = bus.writer(exclusive=harness.topic("w"))
    old.append(appends(topic, "old"))
    new = other.writer(exclusive=name)
    with pytest.raises(Fenced):
        old.append(appends(topic, "zombie", "zombie"))
    new.append(appends(topic, "new"))
    with pytest.raises(BusError):
        old.append(appends(topic, "zombie"))
    stranger.append(appends(topic, "stranger"))
    bus.writer().append(appends(topic, "anybody"))
    reader = bus.reader({partition: 0})
    assert values(read(reader, 4)) == [b"old", b"new", b"stranger", b"anybody"]
    assert catch_up(bus, reader, partition) == []


def an_unknown_outcome_is_said_and_an_exclusive_writer_stops(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    name = harness.topic("w")
    writer = bus.writer(exclusive=name)
    writer.append(appends(topic, "before"))
    harness.make_next_append_unknown(writer)
    with pytest.raises(OutcomeUnknown):
        writer.append(appends(topic, "perhaps"))
    with pytest.raises(BusError) as refused:
        writer.append(appends(topic, "never"))
    assert not isinstance(refused.value, OutcomeUnknown)
    bus.writer(exclusive=name).append(appends(topic, "after"))
    reader = bus.reader({partition: 0})
    assert values(read(reader, 3)) == [b"before", b"perhaps", b"after"]
    assert catch_up(bus, reader, partition) == []


def a_plain_writer_goes_on_after_an_unknown_outcome(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    writer = bus.writer()
    harness.make_next_append_unknown(writer)
    with pytest.raises(OutcomeUnknown):
        writer.append(appends(topic, "perhaps"))
    writer.append(appends(topic, "again"))
    reader = bus.reader({partition: 0})
    assert values(read(reader, 2)) == [b"perhaps", b"again"]


def a_record_too_large_is_refused_with_its_whole_call(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus, max_record_bytes=100_000)
    writer = bus.writer(exclusive=harness.topic("w"))
    fits = Append(topic=topic, value=bytes(99_980), key=b"k" * 10, headers=(("name", b"123456"),))
    over = Append(topic=topic, value=bytes(99_981), key=b"k" * 10, headers=(("name", b"123456"),))
    with pytest.raises(RecordTooLarge):
        writer.append([*appends(topic, "first"), over])
    writer.append([fits] * 50)  # the limit applies to one record
    reader = bus.reader({TopicPartition(topic, 0): 0})
    assert values(read(reader, 50)) == [fits.value] * 50


def what_does_not_exist_is_missing(harness: Harness) -> None:
    bus = harness.open()
    topic, nothing = topic_on(harness, bus, partitions=2), harness.topic("nothing")
    writer = bus.writer(exclusive=harness.topic("w"))
    for tp in (TopicPartition(nothing, 0), TopicPartition(topic, 2), TopicPartition(topic, -1)):
        with pytest.raises(TopicMissing):
            bus.end(tp)
        with pytest.raises(TopicMissing):
            bus.reader({tp: 0})
        with pytest.raises(TopicMissing):
            writer.append([*appends(topic, "x"), *appends(tp.topic, "y", partition=tp.partition)])
    with pytest.raises(TopicMissing):
        bus.partitions(nothing)
    assert nothing not in bus.topics(), "asking must not create"
    writer.append(appends(topic, "only"))
    reader = bus.reader({TopicPartition(topic, 0): 0})
    assert values(read(reader, 1)) == [b"only"], "nothing of the refused calls was appended"


def a_header_that_is_not_ascii_is_refused(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    writer = bus.writer()
    bad: list[tuple[str, bytes]] = [("naïve", b"1"), ("run", "größe".encode()), ("run", b"\xff")]
    for header in bad:
        with pytest.raises(BusError, match="ASCII"):
            writer.append([*appends(topic, "x"), Append(topic=topic, value=b"", headers=(header,))])
    assert bus.end(partition) == 0


def topics_are_created_once_and_stay_as_they_are(harness: Harness) -> None:
    bus = harness.open()
    spec = TopicSpec(name=harness.topic("b"), partitions=3, max_record_bytes=100_000)
    more = TopicSpec(name=harness.topic("a"))
    bus.create([spec])
    bus.create([spec, more])
    assert bus.partitions(spec.name) == 3
    names = bus.topics()
    assert spec.name in names and more.name in names and names == sorted(names)
    for other in (
        TopicSpec(name=spec.name, partitions=4, max_record_bytes=100_000),
        TopicSpec(name=spec.name, partitions=3, max_record_bytes=100_001),
    ):
        with pytest.raises(BusError, match=spec.name):
            harness.open().create([other])
    harness.open().create([TopicSpec(name=spec.name, partitions=2, max_record_bytes=70_000)])
    for bad in ("", "a b", "ä", ".", "x" * 201):
        with pytest.raises(BusError):
            bus.create([TopicSpec(name=bad)])


def closing_is_idempotent_and_final(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    reader, writer, remaining_writer = bus.reader({partition: 0}), bus.writer(), bus.writer()
    for part in (reader, writer, reader, writer):
        part.close()
    with pytest.raises(BusError):
        reader.poll(timeout_s=0)
    with pytest.raises(BusError):
        writer.append(appends(topic, "x"))
    remaining_writer.append(appends(topic, "y"))
    bus.close()
    bus.close()
    for use in (
        lambda: remaining_writer.append(appends(topic, "z")),
        bus.topics,
        bus.writer,
        lambda: bus.reader({partition: 0}),
    ):
        with pytest.raises(BusError):
            use()


def what_was_appended_is_there_after_reopening(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    name = harness.topic("w")
    before = bus.writer(exclusive=name).append(appends(topic, "a", "b"))
    bus.close()
    again = harness.open()
    after = again.writer(exclusive=name).append(appends(topic, "c"))
    assert after[0] > before[-1] + 1, "offsets go on, and leave a gap"
    reader = again.reader({partition: 0})
    assert values(read(reader, 3)) == [b"a", b"b", b"c"]


# Deletion, and readers of deleted records

CALLS_MAX = 100


def trimmed_on(harness: Harness, bus: Bus) -> TopicPartition:
    name = f"{harness.topic('t')}.metrics"
    bus.create([TopicSpec(name=name, partitions=2)])
    return TopicPartition(name, 0)


def trim_all(bus: Bus, partition: TopicPartition, before: int) -> int:
    calls = 1
    while bus.trim(partition, before):
        calls += 1
        assert calls < CALLS_MAX, "it never says that all is deleted"
    return calls


def what_is_left_of_a_trimmed_topic_is_as_it_was(harness: Harness) -> None:
    bus = harness.open()
    partition = trimmed_on(harness, bus)
    writer = bus.writer()
    offsets = [writer.append(appends(partition.topic, f"{i}"))[0] for i in range(6)]
    writer.append(appends(partition.topic, "other", partition=1))
    end = bus.end(partition)
    early = bus.reader({partition: offsets[1]})
    trim_all(bus, partition, offsets[3])
    assert (bus.begin(partition), bus.end(partition), bus.written_end(partition)) == (
        offsets[3],
        end,
        end,
    )
    for reader in (
        early,
        bus.reader({partition: 0}),
        harness.open().reader({partition: offsets[2]}),
    ):
        result = read(reader, 3)
        assert [record.offset for record in result] == offsets[3:]
        assert values(result) == [b"3", b"4", b"5"]
        assert catch_up(bus, reader, partition) == []
    trim_all(bus, partition, offsets[1])
    assert bus.begin(partition) == offsets[3], "nothing comes back"
    assert writer.append(appends(partition.topic, "6"))[0] >= end, "no offset is given twice"
    assert values(read(bus.reader({TopicPartition(partition.topic, 1): 0}), 1)) == [b"other"]


def a_topic_that_is_trimmed_to_its_end_goes_on_there(harness: Harness) -> None:
    bus = harness.open()
    partition = trimmed_on(harness, bus)
    writer = bus.writer()
    assert not bus.trim(partition, 0), "there is nothing to delete"
    offsets = [writer.append(appends(partition.topic, f"{i}", "b"))[0] for i in range(3)]
    end = bus.end(partition)
    trim_all(bus, partition, end)
    assert offsets[2] <= bus.begin(partition) <= end == bus.end(partition)
    reader = bus.reader({partition: 0})
    assert len(catch_up(bus, reader, partition)) <= 1, "the very last record may stay"
    assert reader.position(partition) == bus.end(partition)
    (offset,) = writer.append(appends(partition.topic, "new"))
    assert offset >= end
    result = read(reader, 1)
    assert [(record.offset, record.value) for record in result] == [(offset, b"new")]


def a_long_beginning_goes_in_bounded_pieces(harness: Harness) -> None:
    bus = harness.open()
    partition = trimmed_on(harness, bus)
    texts = [f"{i}" for i in range(1300)]
    offsets = bus.writer().append(appends(partition.topic, *texts))
    begins = [bus.begin(partition)]
    while bus.trim(partition, offsets[1200]):
        begins.append(bus.begin(partition))
        assert len(begins) < CALLS_MAX
    assert begins == sorted(set(begins)), "every call deletes something"
    assert bus.begin(partition) == offsets[1200]
    assert values(read(bus.reader({partition: 0}), 100)) == [text.encode() for text in texts[1200:]]


def what_a_run_rests_on_cannot_be_trimmed(harness: Harness) -> None:
    bus, topic, partition = opened(harness)
    offsets = bus.writer().append(appends(topic, "a", "b"))
    with pytest.raises(BusError, match="must be kept"):
        bus.trim(partition, offsets[1])
    assert values(read(bus.reader({partition: 0}), 2)) == [b"a", b"b"]
    with pytest.raises(BusError):
        bus.trim(TopicPartition(f"{harness.topic('none')}.metrics", 0), 1)


CHECKS: list[Check] = [*bus_checks_reading.CHECKS, *checks_of(globals())]
