"""Tests of the memory bus: planned faults and virtual time."""

from __future__ import annotations

import pytest

from dora_pipe.bus.base import count_empty_polls
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import AppendFault, FaultPlan, MemoryBus, MemoryLog
from dora_pipe.core.errors import BusError, BusFull, LogTruncated, OutcomeUnknown
from dora_pipe.core.pure.records import Append, TopicPartition
from tests.support.bus_steps import ScriptedFaults

AT = TopicPartition("t", 0)


class Clock:
    def __init__(self) -> None:
        self.ms = 0

    def __call__(self) -> int:
        return self.ms


def bus_with(faults: FaultPlan | None = None, *, bytes_max: int | None = None) -> MemoryBus:
    bus = MemoryBus(MemoryLog(bytes_max=bytes_max), faults=faults or ScriptedFaults())
    bus.create([TopicSpec(name="t")])
    return bus


def texts(*given: str) -> list[Append]:
    return [Append(topic="t", value=text.encode()) for text in given]


def landed(bus: Bus) -> list[str]:
    reader = bus.reader({AT: 0})
    return [record.value.decode() for record in reader.poll(timeout_s=0)]


def test_gaps_are_the_same_in_every_run() -> None:
    offsets = []
    for _ in range(2):
        writer = bus_with().writer()
        offsets.append([writer.append(texts("a", "b")) for _ in range(4)])
    assert offsets[0] == offsets[1] == [[0, 1], [3, 4], [7, 8], [12, 13]]


def test_a_failed_append_lands_nothing_and_can_be_tried_again() -> None:
    bus = bus_with(ScriptedFaults(appends={0: AppendFault(kind="failed")}))
    writer = bus.writer()
    with pytest.raises(BusError) as failed:
        writer.append(texts("a"))
    assert type(failed.value) is BusError
    assert landed(bus) == []
    writer.append(texts("a"))
    assert landed(bus) == ["a"]


@pytest.mark.parametrize("lands", [0, 1, 2, 3])
def test_an_unknown_append_lands_the_prefix_that_was_asked_for(lands: int) -> None:
    bus = bus_with(ScriptedFaults(appends={1: AppendFault(kind="unknown", lands=lands)}))
    writer = bus.writer()
    writer.append(texts("first"))
    with pytest.raises(OutcomeUnknown):
        writer.append(texts("a", "b", "c"))
    writer.append(texts("last"))
    assert landed(bus) == ["first", *["a", "b", "c"][:lands], "last"]


def test_a_full_log_refuses_the_whole_call_and_takes_what_fits() -> None:
    bus = bus_with(bytes_max=10)
    writer = bus.writer()
    with pytest.raises(BusFull):
        writer.append(texts("12345", "123456"))
    writer.append(texts("12345", "12345"))
    with pytest.raises(BusFull):
        writer.append(texts("1"))
    assert landed(bus) == ["12345", "12345"]


def test_a_delayed_append_is_seen_when_its_time_has_come_and_hides_what_follows() -> None:
    clock = Clock()
    late = ScriptedFaults(appends={1: AppendFault(kind="delayed", delay_ms=50)})
    bus = MemoryBus(faults=late, now_ms=clock)
    bus.create([TopicSpec(name="t")])
    writer, reader = bus.writer(), bus.reader({AT: 0})
    (first,) = writer.append(texts("now"))
    (second,) = writer.append(texts("late"))
    writer.append(texts("behind"))
    assert [record.value for record in reader.poll(timeout_s=0)] == [b"now"]
    assert first < reader.position(AT) == bus.end(AT) == second, "caught up before the hidden one"
    assert bus.end(AT) < bus.written_end(AT)
    assert reader.held_back() == [AT]
    clock.ms = 49
    assert reader.poll(timeout_s=9) == []
    clock.ms = 50
    assert [record.value for record in reader.poll(timeout_s=0)] == [b"late", b"behind"]
    assert reader.position(AT) == bus.end(AT)
    assert bus.end(AT) == bus.written_end(AT)
    assert reader.held_back() == []


def test_polls_without_progress_are_counted_unless_the_log_holds_them_back() -> None:
    bus = bus_with(ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=5)}))
    reader = bus.reader({AT: 0})

    def count(before: int, *, moved: bool = False) -> int:
        return count_empty_polls(reader, AT, before, moved=moved, polls_max=3)

    assert [count(0), count(2), count(3, moved=True)] == [1, 3, 0]
    with pytest.raises(BusError, match="no record came at offset 0, which is before its end"):
        count(3)
    bus.writer().append(texts("late"))
    assert reader.poll(timeout_s=0) == []
    assert [count(0), count(3)] == [1, 3], "held back: slow, not lost"
    with pytest.raises(BusError, match="t/1"):  # another partition
        count_empty_polls(reader, TopicPartition("t", 1), 3, moved=False, polls_max=3)


def test_a_reader_may_stand_behind_a_record_that_is_still_hidden() -> None:
    bus = bus_with(ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=5)}))
    (offset,) = bus.writer().append(texts("mine"))
    reader = bus.reader({AT: offset + 1})
    assert reader.poll(timeout_s=0) == []
    assert reader.position(AT) == offset + 1, "not truncated, and it does not go back"


def test_a_truncated_log_is_noticed_by_its_readers() -> None:
    bus = bus_with()
    writer = bus.writer()
    kept, lost = [writer.append(texts(text))[0] for text in ("kept", "lost")]
    reader = bus.reader({AT: 0})
    assert len(reader.poll(timeout_s=0)) == 2
    bus.log.truncate(AT, lost)
    with pytest.raises(LogTruncated):
        reader.poll(timeout_s=0)
    assert landed(bus) == ["kept"]
    assert bus.log.bytes_held == len("kept")
    assert kept < bus.end(AT) <= lost
