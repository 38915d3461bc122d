"""The log in memory, for unit tests and the simulator.

Polls never wait. The `MemoryLog` survives crashes of a role; each role opens its own `MemoryBus`
with its own faults.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

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
    record_bytes,
)
from dora_pipe.core.errors import BusError, BusFull, Fenced, OutcomeUnknown
from dora_pipe.core.pure.records import Append, Record, TopicPartition, stored


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendFault:
    """Fault of one append.

    - failed: raises BusError.
    - full: raises BusFull.
    - unknown: appends the first `lands` records and raises OutcomeUnknown.
    - delayed: readers see the records `delay_ms` later.
    """

    kind: Literal["failed", "full", "unknown", "delayed"]
    lands: int = 0
    delay_ms: int = 0


class FaultPlan:
    """Faults by call number, counted from 0 per `MemoryBus`; this one has none."""

    def on_append(self, call: int, records: Sequence[Append]) -> AppendFault | None:
        return None

    def on_poll(self, call: int) -> bool:
        return False


NO_FAULTS = FaultPlan()


@dataclass(slots=True)
class _Partition:
    """Parallel lists, ordered by offset; `visible_ms` never decreases."""

    records: list[Record] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    visible_ms: list[int] = field(default_factory=list)
    end: int = 0
    begin: int = 0

    def visible(self, now_ms: int) -> int:
        count = len(self.records)
        while count and self.visible_ms[count - 1] > now_ms:
            count -= 1
        return count

    def visible_end(self, now_ms: int) -> int:
        """Return the position of the first hidden record, or the end."""
        count = self.visible(now_ms)
        return self.end if count == len(self.records) else self.offsets[count]


class MemoryLog:
    """Topics, records and writer epochs, limited to `bytes_max` of keys, headers and values."""

    def __init__(self, *, bytes_max: int | None = None) -> None:
        self.bytes_max = bytes_max
        self.bytes_held = 0
        self._topics: dict[str, TopicSpec] = {}
        self._partitions: dict[TopicPartition, _Partition] = {}
        self._epochs: dict[str, int] = {}
        self._appends = 0
        self.watch: Callable[[Sequence[Record], int], None] = lambda records, visible_ms: None
        """Called after each append with the time of visibility."""

    def gap_after(self, append: int) -> int:
        """Return the unused offsets after an append: 1, 2 or 3."""
        return 1 + append % 3

    def truncate(self, tp: TopicPartition, position: int) -> None:
        """Delete every record from `position` on, as a lost disk would."""
        check_exists(tp, self._topics)
        held = self._partitions[tp]
        self._drop(held, slice(bisect_left(held.offsets, position), None))
        held.end = min(held.end, position)

    def delete_before(self, tp: TopicPartition, position: int) -> None:
        """Delete every record before `position`, as retention does."""
        check_exists(tp, self._topics)
        held = self._partitions[tp]
        self._drop(held, slice(0, bisect_left(held.offsets, position)))
        held.begin = max(held.begin, min(position, held.end))

    def _drop(self, held: _Partition, which: slice) -> None:
        self.bytes_held -= sum(map(record_bytes, held.records[which]))
        del held.records[which], held.offsets[which], held.visible_ms[which]

    def _create(self, spec: TopicSpec) -> None:
        existing = self._topics.get(spec.name)
        if existing is not None:
            check_same(spec, existing)
            return
        self._topics[spec.name] = spec
        for partition in range(spec.partitions):
            self._partitions[TopicPartition(spec.name, partition)] = _Partition()

    def _append(self, records: Sequence[Append], *, visible_ms: int) -> list[int]:
        landed: list[Record] = []
        touched = set()
        for record in records:
            partition = TopicPartition(record.topic, record.partition)
            held = self._partitions[partition]
            visible_ms = max(visible_ms, held.visible_ms[-1] if held.visible_ms else 0)
            landed.append(stored(record, held.end))
            held.records.append(landed[-1])
            held.offsets.append(held.end)
            held.visible_ms.append(visible_ms)
            held.end += 1
            self.bytes_held += record_bytes(record)
            touched.add(partition)
        for partition in touched:
            self._partitions[partition].end += self.gap_after(self._appends)
        self._appends += 1
        if landed:
            self.watch(landed, visible_ms)
        return [record.offset for record in landed]


class MemoryBus(Bus):
    """View of a `MemoryLog` for a single role; `now_ms` is its clock."""

    def __init__(
        self,
        log: MemoryLog | None = None,
        *,
        faults: FaultPlan = NO_FAULTS,
        now_ms: Callable[[], int] = lambda: 0,
    ) -> None:
        self.log = MemoryLog() if log is None else log
        self.faults = faults
        self.now_ms = now_ms
        self.appends = 0
        self.polls = 0
        self.closed = False

    def create(self, topics: Sequence[TopicSpec]) -> None:
        self.check_open()
        for spec in topics:
            check_spec(spec)
        for spec in topics:
            self.log._create(spec)

    def topics(self) -> list[str]:
        self.check_open()
        return sorted(self.log._topics)

    def partitions(self, topic: str) -> int:
        self.check_open()
        return check_exists(TopicPartition(topic, 0), self.log._topics).partitions

    def begin(self, tp: TopicPartition) -> int:
        return self._partition(tp).begin

    def trim(self, tp: TopicPartition, before: int) -> bool:
        self.check_open()
        check_trimmed(tp)
        check_position(tp, before)
        self.log.delete_before(tp, before)
        return False

    def end(self, tp: TopicPartition) -> int:
        return self._partition(tp).visible_end(self.now_ms())

    def written_end(self, tp: TopicPartition) -> int:
        return self._partition(tp).end

    def reader(self, positions: Mapping[TopicPartition, int]) -> MemoryReader:
        self.check_open()
        for tp, position in positions.items():
            self._partition(tp)
            check_position(tp, position)
        return MemoryReader(self, positions)

    def writer(self, *, exclusive: str | None = None) -> MemoryWriter:
        self.check_open()
        return MemoryWriter(self, exclusive)

    def close(self) -> None:
        self.closed = True

    def _partition(self, tp: TopicPartition) -> _Partition:
        self.check_open()
        check_exists(tp, self.log._topics)
        return self.log._partitions[tp]

    def check_open(self) -> None:
        if self.closed:
            raise BusError("this bus is closed")


class MemoryReader(PositionReader):
    """Reader of a `MemoryLog`; never waits."""

    def __init__(self, bus: MemoryBus, positions: Mapping[TopicPartition, int]) -> None:
        super().__init__(positions, bus.check_open)
        self._bus = bus
        self._turn = 0
        self._held: set[TopicPartition] = set()

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        self._check_open()
        call, self._bus.polls = self._bus.polls, self._bus.polls + 1
        if self._bus.faults.on_poll(call):
            raise BusError("the log cannot be reached")
        self._turn += 1
        ends = self._bus.log._partitions
        if all(position == ends[tp].end for tp, position in self._positions.items()):
            self._held.clear()  # fast path of most polls
            return []
        records: list[Record] = []
        room_bytes = bytes_max
        order = list(self._positions)
        for i in range(len(order)):
            tp = order[(i + self._turn) % len(order)]
            room_bytes = self._take(tp, records, records_max, room_bytes)
        return records

    def _take(
        self, tp: TopicPartition, records: list[Record], records_max: int, room_bytes: int
    ) -> int:
        held = self._bus.log._partitions[tp]
        self._held.discard(tp)
        if self._positions[tp] == held.end:
            return room_bytes
        now_ms = self._bus.now_ms()
        visible_end = held.visible_end(now_ms)
        if visible_end < held.end:
            self._held.add(tp)
        check_not_truncated(tp, self._positions[tp], held.end)
        self._positions[tp] = first_kept(tp, self._positions[tp], held.begin)
        count = held.visible(now_ms)
        for i in range(bisect_left(held.offsets, self._positions[tp]), count):
            size_bytes = record_bytes(held.records[i])
            if len(records) >= records_max or (records and size_bytes > room_bytes):
                return 0
            records.append(held.records[i])
            room_bytes -= size_bytes
            self._positions[tp] = held.offsets[i] + 1
        self._positions[tp] = max(self._positions[tp], visible_end)
        return room_bytes

    def held_back(self) -> list[TopicPartition]:
        self._check_open()
        return sorted(self._held)


class MemoryWriter(Writer):
    """Writer of a `MemoryLog`."""

    def __init__(self, bus: MemoryBus, exclusive: str | None) -> None:
        self._bus = bus
        self._name = exclusive
        self._closed = False
        self._broken = False
        if exclusive is not None:
            bus.log._epochs[exclusive] = bus.log._epochs.get(exclusive, 0) + 1
            self._epoch = bus.log._epochs[exclusive]

    def append(self, records: Sequence[Append]) -> list[int]:
        self._check_writable()
        log = self._bus.log
        check_appends(records, log._topics)
        call, self._bus.appends = self._bus.appends, self._bus.appends + 1
        fault = self._bus.faults.on_append(call, records)
        kind = None if fault is None else fault.kind
        if kind == "failed":
            raise BusError("the log cannot be reached")
        full = kind == "full"
        if log.bytes_max is not None:
            full |= log.bytes_held + sum(map(record_bytes, records)) > log.bytes_max
        if full:
            raise BusFull("the log has no room for these records")
        now_ms = self._bus.now_ms()
        if fault is None or kind == "delayed":
            return log._append(records, visible_ms=now_ms + (fault.delay_ms if fault else 0))
        log._append(records[: fault.lands], visible_ms=now_ms + fault.delay_ms)
        self._broken = self._name is not None
        raise OutcomeUnknown("unknown whether these records were appended")

    def close(self) -> None:
        self._closed = True

    def _check_writable(self) -> None:
        self._bus.check_open()
        if self._closed:
            raise BusError("this writer is closed")
        if self._name is not None and self._bus.log._epochs[self._name] != self._epoch:
            raise Fenced(f"a newer writer {self._name} took over")
        if self._broken:
            raise BusError("this exclusive writer lost track of its appends; open a new one")
