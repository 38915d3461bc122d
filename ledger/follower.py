"""Read a log in fold order, piece by piece.

Unreadable records are counted and skipped. Trajectories and progress are not read. The metrics
topic is lossy; only the last `STATUS_TAIL` records of each partition are read.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from dora_pipe.bus.base import count_empty_polls
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.errors import LogTruncated, SchemaError
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.metrics import AnyMetrics, decode_metrics
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Round, StopRun, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

PIECE_BYTES: Final = 512 * 1024
"""Bytes per topic and piece; bounds the wait of queries."""

RECORDS_MAX: Final = 500

WAIT_S: Final = 0.02
"""A broker returns nothing without a wait."""

POLLS_MAX: Final = 64
"""Polls for one round's control records."""

EMPTY_POLLS_MAX: Final = 1500
"""Consecutive empty polls (30 s) before the log is unreachable."""

STATUS_TAIL: Final = 100_000
"""Ten roles write twenty times as many a day."""

Read = TypeVar("Read")


class LogReader(Protocol):
    def fact(self, offset: int, fact: AnyControl, /) -> None: ...

    def round(self, round_: Round, offset: int, /) -> None: ...


@dataclass(slots=True, kw_only=True)
class TopicCount:
    """Records that were read or named."""

    records: int = 0
    bytes: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    position: int
    end: int


@dataclass(slots=True)
class LogMeter:
    """Counts by topic suffix."""

    topics: dict[str, TopicCount] = field(default_factory=dict)
    positions: dict[tuple[str, int], Position] = field(default_factory=dict)
    """As of the last complete read."""

    def count(self, topic: str, size: int, *, unreadable: bool = False) -> None:
        counted = self.topics.setdefault(topic, TopicCount())
        counted.records += 1
        counted.bytes += size
        counted.unreadable += unreadable


class LogFollower:
    """Follower of one run. Example: ``while follower.advance(): ...`` reads to the current end."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        *readers: LogReader,
        statuses: Callable[[AnyMetrics], None] | None = None,
        meter: LogMeter | None = None,
    ) -> None:
        self.meter = meter or LogMeter()
        self.chain = GENESIS_CHAIN
        self.over = False
        """Stopped by a round; later records are read too."""
        self._bus, self._run = bus, topics.run
        self._listeners = readers
        self._statuses = statuses
        self._control = TopicPartition(topics.control, 0)
        self._decisions = TopicPartition(topics.decisions, 0)
        self._metrics: list[TopicPartition] = []
        starts = {self._control: 0, self._decisions: 0}
        if statuses is not None:
            count = bus.partitions(topics.metrics)
            self._metrics = [
                TopicPartition(topics.metrics, partition) for partition in range(count)
            ]
            starts |= {
                partition: max(bus.begin(partition), bus.end(partition) - STATUS_TAIL)
                for partition in self._metrics
            }
        self._readers: dict[TopicPartition, Reader] = {
            partition: bus.reader({partition: start}) for partition, start in starts.items()
        }
        self._facts: deque[Record] = deque()
        self._rounds: deque[tuple[int, Round]] = deque()
        self._empty_polls: Counter[TopicPartition] = Counter()

    @property
    def unreadable(self) -> Counter[str]:
        counted = self.meter.topics.items()
        return Counter({name: count.unreadable for name, count in counted if count.unreadable})

    @property
    def share(self) -> float:
        """Return the read share of control and decisions. Raises BusError."""
        ends = [self._bus.end(partition) for partition in (self._control, self._decisions)]
        positions = [min(*pair) for pair in zip(self.places, ends, strict=True)]
        return sum(positions) / sum(ends) if sum(ends) else 1.0

    @property
    def places(self) -> tuple[int, int]:
        return self._position(self._control), self._position(self._decisions)

    def advance(self) -> bool:
        """Read one piece; return whether there is more. Raises BusError, LogTruncated."""
        progressed = self._read_statuses()
        progressed = self._read_rounds() or progressed
        while self._rounds and self._pass_round(*self._rounds[0]):
            self._rounds.popleft()
            progressed = True
        if self.over:
            progressed = self._read_rest() or progressed
        more = progressed or any(map(self._has_more, self._readers))
        if not more:
            self._note_positions()
        return more

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def _position(self, partition: TopicPartition) -> int:
        return self._readers[partition].position(partition)

    def _has_more(self, partition: TopicPartition) -> bool:
        """Report whether there is more; control is read only as rounds need it."""
        ends = partition != self._control or self.over
        return ends and self._position(partition) < self._bus.end(partition)

    def _poll(self, partition: TopicPartition) -> list[Record]:
        before = self._position(partition)
        if before >= self._bus.end(partition):
            return []
        reader = self._readers[partition]
        records = reader.poll(timeout_s=WAIT_S, records_max=RECORDS_MAX, bytes_max=PIECE_BYTES)
        moved = bool(records) or reader.position(partition) > before
        self._empty_polls[partition] = count_empty_polls(
            reader, partition, self._empty_polls[partition], moved=moved, polls_max=EMPTY_POLLS_MAX
        )
        return records

    def _decoded(self, record: Record, decode: Callable[[bytes], Read]) -> Read | None:
        topic = record.topic.removeprefix(f"{self._run}.")
        try:
            decoded = decode(record.value)
        except SchemaError:
            self.meter.count(topic, len(record.value), unreadable=True)
            return None
        self.meter.count(topic, len(record.value))
        return decoded

    def _read_statuses(self) -> bool:
        has_records = False
        for partition in self._metrics:
            for record in self._poll(partition):
                has_records = True
                status = self._decoded(record, decode_metrics)
                if self._statuses is not None and not isinstance(status, Unknown | None):
                    self._statuses(status)
        return has_records

    def _read_rounds(self) -> bool:
        if self._rounds:
            return False
        records = self._poll(self._decisions)
        for record in records:
            round_ = self._decoded(record, decode_round)
            if round_ is not None:
                self._rounds.append((record.offset, round_))
        return bool(records)

    def _pass_round(self, offset: int, round_: Round) -> bool:
        """Pass a round and its events on; False if control lags."""
        end = self._bus.end(self._control)
        if round_.control_next > end:
            raise LogTruncated(
                f"round {round_.ordinal} folds control up to {round_.control_next}, which ends at "
                f"{end}",
                hint="part of the log is gone",
            )
        polls = 0
        while self._position(self._control) < round_.control_next:
            if polls == POLLS_MAX:
                return False
            self._facts.extend(self._poll(self._control))
            polls += 1
        while self._facts and self._facts[0].offset < round_.control_next:
            self._pass_fact(self._facts.popleft())
        for reader in self._listeners:
            reader.round(round_, offset)
        self.chain = round_.chain
        self.over = self.over or any(isinstance(decision, StopRun) for decision in round_.decisions)
        return True

    def _read_rest(self) -> bool:
        self._facts.extend(self._poll(self._control))
        has_events = bool(self._facts)
        while self._facts:
            self._pass_fact(self._facts.popleft())
        return has_events

    def _pass_fact(self, record: Record) -> None:
        fact = self._decoded(record, decode_control)
        if not isinstance(fact, Unknown | None):
            for reader in self._listeners:
                reader.fact(record.offset, fact)

    def _note_positions(self) -> None:
        for partition in self._readers:
            end, topic = self._bus.end(partition), partition.topic.removeprefix(f"{self._run}.")
            position = Position(position=min(self._position(partition), end), end=end)
            self.meter.positions[topic, partition.partition] = position
