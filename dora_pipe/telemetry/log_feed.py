"""Tells a tally what a log says, piece by piece; it decides how far statuses are read back.

A round is told behind the control records that it folds, as everywhere. Records that cannot be read
are counted and left out: what is wrong with them is for audit to say. Of the metrics topic, which
is lossy by design, only the last `STATUS_TAIL` records per partition are read. Trajectories and
progress are not read at all: what metrics need of them stands in control.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.metrics import decode_metrics
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import Unknown
from dora_pipe.telemetry.tally import Place, Tally

STATUS_TAIL: Final = 100_000
"""Statuses at the end of a partition that are read; a day of ten roles has twenty times as many."""

PIECE_BYTES: Final = 4 * 1024 * 1024
RECORDS_MAX: Final = 2000
"""Of one poll."""

WAIT_S: Final = 0.02
"""Of one look: a broker gives nothing to a reader that does not wait."""

POLLS_MAX: Final = 64
"""Looks for the control records of one round, within a piece."""


class LogFeed:
    """Follows one run. Example: ``while feed.advance(): ...`` reads up to the present end."""

    def __init__(self, bus: Bus, topics: Topics, tally: Tally) -> None:
        self.tally = tally
        self._bus, self._topics = bus, topics
        self._control = TopicPartition(topics.control, 0)
        self._decisions = TopicPartition(topics.decisions, 0)
        count = bus.partitions(topics.metrics)
        self._metrics = [TopicPartition(topics.metrics, one) for one in range(count)]
        starts = {self._control: 0, self._decisions: 0}
        starts |= {at: max(bus.begin(at), bus.end(at) - STATUS_TAIL) for at in self._metrics}
        self._readers = {at: bus.reader({at: start}) for at, start in starts.items()}
        self._facts: deque[Record] = deque()
        self._rounds: deque[tuple[int, Round]] = deque()

    @property
    def caught_up(self) -> bool:
        """Whether every round that is there now was told. Raises BusError."""
        at = self._decisions
        return not self._rounds and self._readers[at].position(at) >= self._bus.end(at)

    def advance(self) -> bool:
        """Read one piece; whether there is more. Raises BusError, LogTruncated."""
        told = self._statuses()
        told = self._read_rounds() or told
        while self._rounds and self._fold(*self._rounds[0]):
            self._rounds.popleft()
            told = True
        if self.tally.over:
            told = self._fold_rest() or told
        self._note_places()
        return told

    def close(self) -> None:
        """Let go of the readers."""
        for reader in self._readers.values():
            reader.close()

    def _poll(self, at: TopicPartition) -> list[Record]:
        reader = self._readers[at]
        if reader.position(at) >= self._bus.end(at):
            return []
        return reader.poll(timeout_s=WAIT_S, records_max=RECORDS_MAX, bytes_max=PIECE_BYTES)

    def _statuses(self) -> bool:
        told = False
        for record in self._polled_statuses():
            told = True
            try:
                status = decode_metrics(record.value)
            except SchemaError:
                self.tally.count("metrics", len(record.value), unreadable=True)
                continue
            self.tally.count("metrics", len(record.value))
            if not isinstance(status, Unknown):
                self.tally.status(status)
        return told

    def _polled_statuses(self) -> Iterator[Record]:
        for at in self._metrics:
            yield from self._poll(at)

    def _read_rounds(self) -> bool:
        if self._rounds:
            return False
        records = self._poll(self._decisions)
        for record in records:
            try:
                self._rounds.append((record.offset, decode_round(record.value)))
            except SchemaError:
                self.tally.count("decisions", len(record.value), unreadable=True)
            else:
                self.tally.count("decisions", len(record.value))
        return bool(records)

    def _fold(self, offset: int, round_: Round) -> bool:
        """Tell a round and what it folds; False while control was not read so far."""
        reader = self._readers[self._control]
        polls = 0
        while reader.position(self._control) < round_.control_next:
            if polls == POLLS_MAX:
                return False
            self._facts.extend(self._poll(self._control))
            polls += 1
        while self._facts and self._facts[0].offset < round_.control_next:
            self._fact(self._facts.popleft())
        self.tally.round(round_, offset)
        return True

    def _fold_rest(self) -> bool:
        """What was said behind the last round: workers that leave."""
        self._facts.extend(self._poll(self._control))
        told = bool(self._facts)
        while self._facts:
            self._fact(self._facts.popleft())
        return told

    def _fact(self, record: Record) -> None:
        try:
            fact = decode_control(record.value)
        except SchemaError:
            self.tally.count("control", len(record.value), unreadable=True)
            return
        self.tally.count("control", len(record.value))
        if not isinstance(fact, Unknown):
            self.tally.fact(record.offset, fact)

    def _note_places(self) -> None:
        """How far the readers are, and where each topic ends."""
        for at, reader in self._readers.items():
            short = at.topic.removeprefix(f"{self._topics.run}.")
            end = self._bus.end(at)
            place = Place(position=min(reader.position(at), end), end=end)
            self.tally.places[short, at.partition] = place
        self.tally.control_end = self.tally.places["control", 0].end
