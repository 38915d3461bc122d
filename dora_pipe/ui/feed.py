"""Reads a log into a book, piece by piece; it decides how much a piece is.

A round is folded behind the control records that it folds, as everywhere. Records that cannot be
read are counted and left out: what is wrong with them is for audit to say.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.errors import SchemaError
from dora_pipe.history.reading import rare_collections
from dora_pipe.schemas.control import decode_control
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.ui.book import Book

PIECE_BYTES: Final = 512 * 1024
"""Of each topic in one piece: what a page that is asked for meanwhile waits for."""

RECORDS_MAX: Final = 500

WAIT_S: Final = 0.02
"""Of one look: a broker gives nothing to a reader that does not wait."""

POLLS_MAX: Final = 64
"""Looks for the control records of one round, within a piece."""


class Feed:
    """Follows one run. Example: ``while feed.advance(): ...`` reads up to the present end."""

    def __init__(self, bus: Bus, topics: Topics, book: Book) -> None:
        self.book = book
        self.unreadable = 0
        self._bus = bus
        self._control = TopicPartition(topics.control, 0)
        self._decisions = TopicPartition(topics.decisions, 0)
        places = (self._control, self._decisions)
        self._readers = {one: bus.reader({one: 0}) for one in places}
        self._facts: deque[Record] = deque()
        self._rounds: deque[Round] = deque()

    @property
    def read(self) -> float:
        """The share of control and decisions that was read, 0 to 1."""
        places = (self._control, self._decisions)
        ends = sum(self._bus.end(one) for one in places)
        at = sum(min(self._readers[one].position(one), self._bus.end(one)) for one in places)
        return at / ends if ends else 1.0

    def advance(self) -> bool:
        """Read one piece; whether there is more. Raises BusError, LogTruncated."""
        with rare_collections():
            return self._advance()

    def _advance(self) -> bool:
        before = self.book.revision
        if not self._rounds:
            self._rounds.extend(self._read_rounds())
        while self._rounds and self._fold(self._rounds[0]):
            self._rounds.popleft()
        if self.book.stopped:
            self._fold_rest()
        return self.book.revision != before or any(map(self._has_more, self._readers))

    def close(self) -> None:
        """Let go of the readers."""
        for reader in self._readers.values():
            reader.close()

    def _has_more(self, at: TopicPartition) -> bool:
        """Whether there is something to read; of control, only what rounds lead to is read."""
        ends = at != self._control or self.book.stopped
        return ends and self._readers[at].position(at) < self._bus.end(at)

    def _poll(self, at: TopicPartition) -> list[Record]:
        reader = self._readers[at]
        if reader.position(at) >= self._bus.end(at):
            return []
        return reader.poll(timeout_s=WAIT_S, records_max=RECORDS_MAX, bytes_max=PIECE_BYTES)

    def _read_rounds(self) -> list[Round]:
        found = []
        for record in self._poll(self._decisions):
            try:
                found.append(decode_round(record.value))
            except SchemaError:
                self.unreadable += 1
        return found

    def _fold(self, round_: Round) -> bool:
        """Fold a round and what it folds; False while control was not read so far."""
        reader = self._readers[self._control]
        polls = 0
        while reader.position(self._control) < round_.control_next:
            if polls == POLLS_MAX:
                return False
            self._facts.extend(self._poll(self._control))
            polls += 1
        while self._facts and self._facts[0].offset < round_.control_next:
            self._take_fact(self._facts.popleft())
        self.book.take_round(round_)
        return True

    def _fold_rest(self) -> None:
        """What was said behind the last round: workers that leave."""
        self._facts.extend(self._poll(self._control))
        while self._facts:
            self._take_fact(self._facts.popleft())

    def _take_fact(self, record: Record) -> None:
        try:
            self.book.take_fact(record.offset, decode_control(record.value))
        except SchemaError:
            self.unreadable += 1
