"""The part of the bus contract that writers, and those who open and close, rely on."""

from __future__ import annotations

import os
import warnings

import pytest

from dora_pipe.bus.port import Append, TopicPartition, TopicSpec
from dora_pipe.core.errors import (
    BusError,
    DoraError,
    Fenced,
    OutcomeUnknown,
    RecordTooLarge,
    TopicMissing,
)
from tests.support.bus_steps import (
    Check,
    Harness,
    appends,
    catch_up,
    read,
    topic_on,
    values,
)


def a_newer_exclusive_writer_fences_the_older_one(harness: Harness) -> None:
    bus, other = harness.open(), harness.open()
    topic = topic_on(harness, bus)
    at, name = TopicPartition(topic, 0), harness.topic("w")
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
    reader = bus.reader({at: 0})
    assert values(read(reader, 4)) == [b"old", b"new", b"stranger", b"anybody"]
    assert catch_up(bus, reader, at) == []


def an_unknown_outcome_is_said_and_an_exclusive_writer_stops(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at, name = TopicPartition(topic, 0), harness.topic("w")
    writer = bus.writer(exclusive=name)
    writer.append(appends(topic, "before"))
    harness.make_next_append_unknown(writer)
    with pytest.raises(OutcomeUnknown):
        writer.append(appends(topic, "perhaps"))
    with pytest.raises(BusError) as refused:
        writer.append(appends(topic, "never"))
    assert not isinstance(refused.value, OutcomeUnknown)
    bus.writer(exclusive=name).append(appends(topic, "after"))
    reader = bus.reader({at: 0})
    assert values(read(reader, 3)) == [b"before", b"perhaps", b"after"]
    assert catch_up(bus, reader, at) == []


def a_plain_writer_goes_on_after_an_unknown_outcome(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer()
    harness.make_next_append_unknown(writer)
    with pytest.raises(OutcomeUnknown):
        writer.append(appends(topic, "perhaps"))
    writer.append(appends(topic, "again"))
    reader = bus.reader({TopicPartition(topic, 0): 0})
    assert values(read(reader, 2)) == [b"perhaps", b"again"]


def a_record_too_large_is_refused_with_its_whole_call(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus, record_bytes_max=1000)
    writer = bus.writer(exclusive=harness.topic("w"))
    fits = Append(topic=topic, value=bytes(980), key=b"k" * 10, headers=(("name", b"123456"),))
    over = Append(topic=topic, value=bytes(981), key=b"k" * 10, headers=(("name", b"123456"),))
    with pytest.raises(RecordTooLarge):
        writer.append([*appends(topic, "first"), over])
    writer.append([fits] * 50)  # the bound is on one record, not on the call
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
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer()
    bad: list[tuple[str, bytes]] = [("naïve", b"1"), ("run", "größe".encode()), ("run", b"\xff")]
    for header in bad:
        with pytest.raises(BusError, match="ASCII"):
            writer.append([*appends(topic, "x"), Append(topic=topic, value=b"", headers=(header,))])
    assert bus.end(TopicPartition(topic, 0)) == 0


def topics_are_created_once_and_stay_as_they_are(harness: Harness) -> None:
    bus = harness.open()
    spec = TopicSpec(name=harness.topic("b"), partitions=3, record_bytes_max=5000)
    more = TopicSpec(name=harness.topic("a"))
    bus.create([spec])
    bus.create([spec, more])
    assert bus.partitions(spec.name) == 3
    names = bus.topics()
    assert spec.name in names and more.name in names and names == sorted(names)
    for other in (
        TopicSpec(name=spec.name, partitions=4, record_bytes_max=5000),
        TopicSpec(name=spec.name, partitions=3, record_bytes_max=5001),
    ):
        with pytest.raises(BusError, match=spec.name):
            harness.open().create([other])
    for bad in ("", "a b", "ä", ".", "x" * 201):
        with pytest.raises(BusError):
            bus.create([TopicSpec(name=bad)])


def closing_is_idempotent_and_final(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    reader, writer, left = bus.reader({at: 0}), bus.writer(), bus.writer()
    for part in (reader, writer, reader, writer):
        part.close()
    with pytest.raises(BusError):
        reader.poll(timeout_s=0)
    with pytest.raises(BusError):
        writer.append(appends(topic, "x"))
    left.append(appends(topic, "y"))
    bus.close()
    bus.close()
    for use in (
        lambda: left.append(appends(topic, "z")),
        bus.topics,
        bus.writer,
        lambda: bus.reader({at: 0}),
    ):
        with pytest.raises(BusError):
            use()


def what_was_appended_is_there_after_reopening(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at, name = TopicPartition(topic, 0), harness.topic("w")
    before = bus.writer(exclusive=name).append(appends(topic, "a", "b"))
    bus.close()
    again = harness.open()
    after = again.writer(exclusive=name).append(appends(topic, "c"))
    assert after[0] > before[-1] + 1, "offsets go on, and leave a gap"
    reader = again.reader({at: 0})
    assert values(read(reader, 3)) == [b"a", b"b", b"c"]


def a_forked_child_is_refused(harness: Harness) -> None:
    """The parent goes on undisturbed; the child exits with 0 only if all three were refused."""
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    reader, writer = bus.reader({at: 0}), bus.writer()
    if not harness.shared:
        return  # a log in memory is simply another log after a fork
    with warnings.catch_warnings():
        # Newer Pythons warn of forking beside threads, which is what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: reader.poll(timeout_s=0),
            lambda: writer.append(appends(topic, "child")),
            lambda: bus.end(at),
        ):
            try:
                use()
            except DoraError as error:
                refused += "fork" in error.message
        os._exit(0 if refused == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0, "a forked child could use what its parent opened"
    writer.append(appends(topic, "parent"))
    assert values(read(reader, 1)) == [b"parent"]


CHECKS: list[Check] = [
    a_newer_exclusive_writer_fences_the_older_one,
    an_unknown_outcome_is_said_and_an_exclusive_writer_stops,
    a_plain_writer_goes_on_after_an_unknown_outcome,
    a_record_too_large_is_refused_with_its_whole_call,
    what_does_not_exist_is_missing,
    a_header_that_is_not_ascii_is_refused,
    topics_are_created_once_and_stay_as_they_are,
    closing_is_idempotent_and_final,
    what_was_appended_is_there_after_reopening,
    a_forked_child_is_refused,
]
