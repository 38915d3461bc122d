"""What every bus must keep, as functions over a harness; `CHECKS` is the whole contract.

A check raises AssertionError when the bus breaks the promise in its name. They are functions and
not tests so that deliberately broken buses can be run through them too: each of those must fail.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from dora_pipe.bus.port import Append, Bus, Reader, Record, TopicPartition, TopicSpec, Writer
from dora_pipe.errors import (
    BusError,
    DoraError,
    Fenced,
    LogTruncated,
    OutcomeUnknown,
    RecordTooLarge,
    TopicMissing,
)

PATIENCE_S = 30.0
"""How long a check waits for what must come; only a broken bus ever waits so long."""


class Harness(Protocol):
    """One log, and how to open it."""

    waits: bool
    """Whether a poll really waits; the memory bus has no time of its own."""
    shared: bool
    """Whether other processes can open `url`."""
    url: str

    def open(self) -> Bus:
        """One more bus on the same log; the caller closes it, or the harness at the end."""
        ...

    def topic(self, name: str) -> str:
        """A name that nobody else uses."""
        ...

    def make_next_append_unknown(self, writer: Writer) -> None:
        """The next append of this writer lands, but the writer does not hear of it."""
        ...


Check = Callable[[Harness], None]
CHECKS: list[Check] = []


def check(function: Check) -> Check:
    """Add a function to the contract."""
    CHECKS.append(function)
    return function


def topic_on(harness: Harness, bus: Bus, *, partitions: int = 1, record_bytes_max: int = 0) -> str:
    """A fresh topic."""
    name = harness.topic("t")
    spec = TopicSpec(name=name, partitions=partitions)
    if record_bytes_max:
        spec = TopicSpec(name=name, partitions=partitions, record_bytes_max=record_bytes_max)
    bus.create([spec])
    return name


def read(reader: Reader, count: int) -> list[Record]:
    """Exactly the next `count` records."""
    found: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < count:
        found += reader.poll(timeout_s=0.5, records_max=count - len(found))
        assert time.monotonic() < deadline_s, f"{len(found)} of {count} records came"
    return found


def catch_up(bus: Bus, reader: Reader, at: TopicPartition) -> list[Record]:
    """Everything up to the end, by the only right meaning of "caught up"."""
    found: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while reader.position(at) < bus.end(at):
        found += reader.poll(timeout_s=0.2)
        assert time.monotonic() < deadline_s, f"stuck at {reader.position(at)} of {bus.end(at)}"
    return found


def values(records: Sequence[Record]) -> list[bytes]:
    """The values only."""
    return [record.value for record in records]


def appends(topic: str, *texts: str, partition: int = 0) -> list[Append]:
    """One record for each text."""
    return [Append(topic=topic, value=text.encode(), partition=partition) for text in texts]


@check
def offsets_increase_and_leave_gaps(harness: Harness) -> None:
    """A reader that computes "last offset + 1" must meet a gap here, on every bus."""
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer(exclusive=harness.topic("w"))
    offsets = [offset for i in range(5) for offset in writer.append(appends(topic, f"{i}", "b"))]
    assert offsets == sorted(set(offsets)), "offsets must increase"
    assert offsets[-1] > len(offsets) - 1, "this bus is dense: no reader learns to pass gaps"
    reader = bus.reader({TopicPartition(topic, 0): 0})
    assert [record.offset for record in read(reader, 10)] == offsets


@check
def caught_up_means_position_and_not_last_offset(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    reader = bus.reader({at: 0})
    assert (reader.position(at), bus.end(at)) == (0, 0)
    assert reader.poll(timeout_s=0) == []
    writer = bus.writer(exclusive=harness.topic("w"))
    for i in range(3):
        (last,) = writer.append(appends(topic, f"{i}"))
    read(reader, 3)
    assert catch_up(bus, reader, at) == []
    assert reader.position(at) == bus.end(at)
    assert reader.position(at) > last + 1, "the position must pass what lies behind the last record"


@check
def headers_keys_and_values_come_back_as_they_were(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus, partitions=2)
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


@check
def a_record_of_eight_mebibytes_passes(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    value = os.urandom(1024) * 8192
    bus.writer().append([Append(topic=topic, value=value)])
    reader = bus.reader({TopicPartition(topic, 0): 0})
    assert values(read(reader, 1)) == [value]


@check
def order_is_kept_in_each_partition(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus, partitions=3)
    writer = bus.writer()
    for i in range(20):
        call = [appends(topic, f"{i}-{j}", partition=(i + j) % 3)[0] for j in range(5)]
        assert len(writer.append(call)) == 5
    reader = bus.reader({TopicPartition(topic, p): 0 for p in range(3)})
    found = read(reader, 100)
    for partition in range(3):
        wanted = [f"{i}-{j}" for i in range(20) for j in range(5) if (i + j) % 3 == partition]
        mine = [record for record in found if record.partition == partition]
        assert [record.value.decode() for record in mine] == wanted
        assert [record.offset for record in mine] == sorted({record.offset for record in mine})


@check
def an_append_of_several_topics_returns_offsets_in_the_given_order(harness: Harness) -> None:
    bus = harness.open()
    one, two = topic_on(harness, bus), topic_on(harness, bus, partitions=2)
    writer = bus.writer(exclusive=harness.topic("w"))
    call = [*appends(one, "a"), *appends(two, "b", partition=1), *appends(one, "c")]
    offsets = writer.append(call)
    reader = bus.reader({TopicPartition(one, 0): 0, TopicPartition(two, 1): 0})
    found = {record.value: record.offset for record in read(reader, 3)}
    assert offsets == [found[b"a"], found[b"b"], found[b"c"]]
    assert writer.append([]) == []


@check
def a_poll_with_nothing_to_read_ends_at_its_deadline(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    reader = bus.reader({TopicPartition(topic, 0): 0})
    reader.poll(timeout_s=0.1)
    began_s = time.monotonic()
    assert reader.poll(timeout_s=0.3) == []
    took_s = time.monotonic() - began_s
    assert took_s < PATIENCE_S
    assert took_s >= 0.25 or not harness.waits
    assert took_s < 0.25 or harness.waits


@check
def a_waiting_poll_returns_when_something_comes(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    reader = bus.reader({TopicPartition(topic, 0): 0})
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


@check
def polls_that_never_wait_get_everything_in_the_end(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    bus.writer().append(appends(topic, *"abcdef"))
    reader = bus.reader({TopicPartition(topic, 0): 0})
    found: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(found) < 6 and time.monotonic() < deadline_s:
        found += reader.poll(timeout_s=0, records_max=4)
        time.sleep(0.001 if harness.waits else 0)
    assert b"".join(values(found)) == b"abcdef"


@check
def polls_are_bounded_by_records_and_bytes(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    offsets = bus.writer().append([Append(topic=topic, value=bytes(1000)) for _ in range(10)])
    reader = bus.reader({at: 0})
    assert len(read_poll(reader, records_max=3)) == 3
    assert reader.position(at) == offsets[3], "what was not returned was not passed"
    assert len(read_poll(reader, bytes_max=2500)) == 2
    assert reader.position(at) == offsets[5]
    assert len(read_poll(reader, bytes_max=10)) == 1, "one record comes back however large"
    rest = read(reader, 4)
    assert [record.offset for record in rest] == offsets[6:]


def read_poll(reader: Reader, *, records_max: int = 500, bytes_max: int = 1 << 20) -> list[Record]:
    """The first poll that returns something."""
    deadline_s = time.monotonic() + PATIENCE_S
    found: list[Record] = []
    while not found and time.monotonic() < deadline_s:
        found = reader.poll(timeout_s=0.5, records_max=records_max, bytes_max=bytes_max)
    return found


@check
def a_full_partition_does_not_starve_the_others(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus, partitions=2)
    writer = bus.writer()
    writer.append([Append(topic=topic, value=bytes(100)) for _ in range(60)])
    writer.append(appends(topic, "other", partition=1))
    reader = bus.reader({TopicPartition(topic, 0): 0, TopicPartition(topic, 1): 0})
    polls = [read_poll(reader, records_max=20) for _ in range(4)]
    assert b"other" in values([record for poll in polls for record in poll])
    assert sum(map(len, polls)) == 61


@check
def a_reader_goes_on_from_any_position_also_inside_a_gap(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    writer = bus.writer(exclusive=harness.topic("w"))
    offsets = [writer.append(appends(topic, f"{i}"))[0] for i in range(4)]
    reader = bus.reader({at: offsets[1] + 1})
    assert values(read(reader, 2)) == [b"2", b"3"]
    reader.seek(at, 0)
    assert reader.position(at) == 0
    assert values(read(reader, 4)) == [b"0", b"1", b"2", b"3"], "seeking back reads again"
    reader.seek(at, offsets[3] + 1)
    assert catch_up(bus, reader, at) == []
    assert reader.position(at) == bus.end(at)
    writer.append(appends(topic, "4"))
    assert values(read(reader, 1)) == [b"4"]


@check
def a_seek_drops_what_was_fetched_ahead(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    offsets = bus.writer().append(appends(topic, *"abcdef"))
    reader = bus.reader({at: 0})
    assert values(read_poll(reader, bytes_max=1)) == [b"a"]
    reader.seek(at, offsets[4])
    assert reader.position(at) == offsets[4]
    assert values(read(reader, 2)) == [b"e", b"f"]


@check
def a_position_beyond_the_end_is_a_truncated_log(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    bus.writer().append(appends(topic, "a"))
    reader = bus.reader({at: 1000})
    deadline_s = time.monotonic() + PATIENCE_S
    with pytest.raises(LogTruncated):
        while time.monotonic() < deadline_s:
            assert reader.poll(timeout_s=0.2) == []
            assert harness.waits, "a bus without time must say so at the first poll"
    with pytest.raises(BusError):
        reader.seek(at, -1)
    reader.seek(at, 0)
    assert values(read(reader, 1)) == [b"a"]


@check
def readers_do_not_disturb_each_other(harness: Harness) -> None:
    bus, other = harness.open(), harness.open()
    topic = topic_on(harness, bus, partitions=2)
    at = TopicPartition(topic, 0)
    one, two = bus.reader({at: 0}), other.reader({at: 0, TopicPartition(topic, 1): 0})
    bus.writer().append(appends(topic, "a", "b"))
    assert values(read(one, 2)) == [b"a", b"b"]
    bus.writer().append(appends(topic, "c"))
    assert values(read(two, 3)) == [b"a", b"b", b"c"]
    assert values(read(one, 1)) == [b"c"]
    with pytest.raises(BusError):
        one.position(TopicPartition(topic, 1))


@check
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


@check
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


@check
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


@check
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


@check
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


@check
def a_header_that_is_not_ascii_is_refused(harness: Harness) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer()
    bad: list[tuple[str, bytes]] = [("naïve", b"1"), ("run", "größe".encode()), ("run", b"\xff")]
    for header in bad:
        with pytest.raises(BusError, match="ASCII"):
            writer.append([*appends(topic, "x"), Append(topic=topic, value=b"", headers=(header,))])
    assert bus.end(TopicPartition(topic, 0)) == 0


@check
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


@check
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


@check
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


@check
def a_forked_child_is_refused(harness: Harness) -> None:
    """The parent goes on undisturbed; the child exits with 0 only if all three were refused."""
    bus = harness.open()
    topic = topic_on(harness, bus)
    at = TopicPartition(topic, 0)
    reader, writer = bus.reader({at: 0}), bus.writer()
    if not harness.shared:
        return  # a log in memory is simply another log after a fork
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
