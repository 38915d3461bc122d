"""Reads a log into whoever wants to know it, in the order of the fold; it decides how much at once.

A round comes behind the control records that it folds. Records that cannot be read are counted
and left out: what is wrong with them is for audit to say. Trajectories and progress are not read.
The metrics topic is read for those who ask for it: it is lossy by design, so only the last
`STATUS_TAIL` records of a partition are, and a bus passes over what retention has deleted.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

from dora_pipe.bus.base import count_empty_polls
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.core.errors import LogTruncated, SchemaError
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.metrics import AnyMetrics, decode_metrics
from dora_pipe.schemas.rounds import GENESIS_CHAIN, Round, StopRun, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown

PIECE_BYTES: Final = 512 * 1024
"""Of each topic in one piece: what a question that is asked meanwhile waits for."""

RECORDS_MAX: Final = 500

WAIT_S: Final = 0.02
"""Of one look: a broker gives nothing to a reader that does not wait."""

POLLS_MAX: Final = 64
"""Looks for the control records of one round, within a piece."""

EMPTY_POLLS_MAX: Final = 1500
"""Looks in vain for records that are there, one after the other, before the log counts as
unreachable: half a minute of waits."""

STATUS_TAIL: Final = 100_000
"""Statuses at the end of a partition that are read; a day of ten roles has twenty times as many."""

Read = TypeVar("Read")


class LogReader(Protocol):
    """Who follows a log."""

    def fact(self, offset: int, fact: AnyControl, /) -> None: ...

    def round(self, round_: Round, offset: int, /) -> None:
        """A round, after the facts that it folds."""
        ...


@dataclass(slots=True, kw_only=True)
class TopicCount:
    """Records of a topic that were read, or were named by those that were."""

    records: int = 0
    bytes: int = 0
    unreadable: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a reader is in one partition."""

    position: int
    end: int


@dataclass(slots=True)
class LogMeter:
    """What was read of a log, by the end of each topic's name."""

    topics: dict[str, TopicCount] = field(default_factory=dict)
    positions: dict[tuple[str, int], Position] = field(default_factory=dict)
    """By partition, as of when everything was read last."""

    def count(self, topic: str, size: int, *, unreadable: bool = False) -> None:
        """A record of a topic was read, or named by one that was."""
        counted = self.topics.setdefault(topic, TopicCount())
        counted.records += 1
        counted.bytes += size
        counted.unreadable += unreadable


class LogFollower:
    """Follows one run. Example: ``while follower.advance(): ...`` reads up to the present end."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        *readers: LogReader,
        statuses: Callable[[AnyMetrics], None] | None = None,
        meter: LogMeter | None = None,
    ) -> None:
        """`statuses` gets every record of the metrics topic, which is read for it alone."""
        self.meter = meter or LogMeter()
        self.chain = GENESIS_CHAIN
        """Of the last round that was read."""
        self.over = False
        """A round has stopped the run: what comes after it is read too."""
        self._bus, self._run = bus, topics.run
        self._listeners = readers
        self._statuses = statuses
        self._control = TopicPartition(topics.control, 0)
        self._decisions = TopicPartition(topics.decisions, 0)
        self._metrics: list[TopicPartition] = []
        starts = {self._control: 0, self._decisions: 0}
        if statuses is not None:
            count = bus.partitions(topics.metrics)
            self._metrics = [TopicPartition(topics.metrics, one) for one in range(count)]
            starts |= {at: max(bus.begin(at), bus.end(at) - STATUS_TAIL) for at in self._metrics}
        self._readers: dict[TopicPartition, Reader] = {
            at: bus.reader({at: start}) for at, start in starts.items()
        }
        self._facts: deque[Record] = deque()
        self._rounds: deque[tuple[int, Round]] = deque()
        self._empty_polls: Counter[TopicPartition] = Counter()

    @property
    def unreadable(self) -> Counter[str]:
        """Records that could not be read, by `control`, `decisions` and `metrics`."""
        counted = self.meter.topics.items()
        return Counter({name: one.unreadable for name, one in counted if one.unreadable})

    @property
    def share(self) -> float:
        """The share of control and decisions that was read, 0 to 1. Raises BusError."""
        ends = [self._bus.end(one) for one in (self._control, self._decisions)]
        at = [min(*pair) for pair in zip(self.places, ends, strict=True)]
        return sum(at) / sum(ends) if sum(ends) else 1.0

    @property
    def places(self) -> tuple[int, int]:
        """Positions in control and decisions."""
        return self._position(self._control), self._position(self._decisions)

    def advance(self) -> bool:
        """Read one piece; whether there is more. Raises BusError, LogTruncated."""
        found = self._read_statuses()
        found = self._read_rounds() or found
        while self._rounds and self._pass_round(*self._rounds[0]):
            self._rounds.popleft()
            found = True
        if self.over:
            found = self._read_rest() or found
        more = found or any(map(self._has_more, self._readers))
        if not more:
            self._note_positions()
        return more

    def close(self) -> None:
        """Let go of the log."""
        for reader in self._readers.values():
            reader.close()

    def _position(self, at: TopicPartition) -> int:
        return self._readers[at].position(at)

    def _has_more(self, at: TopicPartition) -> bool:
        """Whether there is something to read; of control, only what rounds lead to is read."""
        ends = at != self._control or self.over
        return ends and self._position(at) < self._bus.end(at)

    def _poll(self, at: TopicPartition) -> list[Record]:
        before = self._position(at)
        if before >= self._bus.end(at):
            return []
        reader = self._readers[at]
        records = reader.poll(timeout_s=WAIT_S, records_max=RECORDS_MAX, bytes_max=PIECE_BYTES)
        moved = bool(records) or reader.position(at) > before
        self._empty_polls[at] = count_empty_polls(
            reader, at, self._empty_polls[at], moved=moved, polls_max=EMPTY_POLLS_MAX
        )
        return records

    def _decoded(self, at: Record, decode: Callable[[bytes], Read]) -> Read | None:
        """What a record says, counted; None for one that cannot be read."""
        topic = at.topic.removeprefix(f"{self._run}.")
        try:
            found = decode(at.value)
        except SchemaError:
            self.meter.count(topic, len(at.value), unreadable=True)
            return None
        self.meter.count(topic, len(at.value))
        return found

    def _read_statuses(self) -> bool:
        found = False
        for at in self._metrics:
            for record in self._poll(at):
                found = True
                status = self._decoded(record, decode_metrics)
                if self._statuses is not None and not isinstance(status, Unknown | None):
                    self._statuses(status)
        return found

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
        """Tell a round and what it folds; False while control was not read so far."""
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
        self.over = self.over or any(isinstance(one, StopRun) for one in round_.decisions)
        return True

    def _read_rest(self) -> bool:
        """What was said behind the last round: workers that leave."""
        self._facts.extend(self._poll(self._control))
        found = bool(self._facts)
        while self._facts:
            self._pass_fact(self._facts.popleft())
        return found

    def _pass_fact(self, record: Record) -> None:
        fact = self._decoded(record, decode_control)
        if not isinstance(fact, Unknown | None):
            for reader in self._listeners:
                reader.fact(record.offset, fact)

    def _note_positions(self) -> None:
        for at in self._readers:
            end, topic = self._bus.end(at), at.topic.removeprefix(f"{self._run}.")
            position = Position(position=min(self._position(at), end), end=end)
            self.meter.positions[topic, at.partition] = position
