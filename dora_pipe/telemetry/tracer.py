"""Follows a log and makes the traces of what ends in it; it decides when a reader gives up.

Everybody who wants the traces of a whole log goes through here, while the run lives or years later.
Control is read as far as each round folds it, so the order is that of the fold. Of the trajectories
topic one pass is read; what is told of records waits until its group ends. Memory is bounded by
what is open, and by `HELD_MAX` records that nobody has named.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.claims import lost_claim
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.errors import BusError, SchemaError
from dora_pipe.schemas.control import AnyControl, decode_control
from dora_pipe.schemas.rounds import Round, decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_glance import Glancer
from dora_pipe.schemas.wire import Unknown
from dora_pipe.telemetry.course import Courses, Ended, GroupEnded, RunFacts
from dora_pipe.telemetry.keeping import Keeper, Share
from dora_pipe.telemetry.span import Span
from dora_pipe.telemetry.spans import Content, content_of, group_spans, step_spans

POLL_S: Final = 1.0
"""One wait for records that are known to be there."""

EMPTY_POLLS_MAX: Final = 30
"""So many waits in vain, one after the other, and the log counts as unreachable."""

ROUNDS_MAX: Final = 200
"""Rounds of one look."""

RECORDS_MAX: Final = 256
BYTES_MAX: Final = 4 * 1024 * 1024
"""Of one poll of the trajectories topic."""

HELD_MAX: Final = 20_000
"""Records that were read before somebody named them; about a kilobyte each. Of more, the oldest are
let go, and read a second time if they are named after all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What one round ended."""

    spans: list[Span]
    offset: int
    """Of the round in decisions: whoever has sent the spans need not see it again."""


class Tracer:
    """The traces of a run, from a log. `after`: rounds up to this offset were sent before.

    Example::

        tracer = Tracer(bus, Topics("demo"), Share())
        for traced in tracer.turn(timeout_s=0.0):
            sink.send(traced.spans)
    """

    def __init__(self, bus: Bus, topics: Topics, share: Share, *, after: int = -1) -> None:
        self._after = after
        self._keeper = Keeper(share)
        self._courses = Courses()
        self._decisions = TopicPartition(topics.decisions, 0)
        self._control = _Control(bus, TopicPartition(topics.control, 0))
        self._reader = bus.reader({self._decisions: 0})
        self._bus = bus
        self._contents = _Contents(bus, topics)
        self.kept = 0
        """Groups that were traced."""
        self.left_out = 0
        """Groups that were not, by their share."""

    @property
    def over(self) -> bool:
        """Whether the round that stops the run was read."""
        return self._courses.over

    @property
    def run(self) -> RunFacts | None:
        """What `run started` says; None before it."""
        return self._courses.run

    @property
    def open(self) -> int:
        """Groups that have not ended."""
        return len(self._courses.open)

    @property
    def caught_up(self) -> bool:
        """Whether every round that is there now was read."""
        return self._reader.position(self._decisions) >= self._bus.end(self._decisions)

    def turn(self, *, timeout_s: float) -> Iterator[Traced]:
        """The next rounds that end something. Raises BusError, SchemaError for a bad round."""
        for record in self._reader.poll(timeout_s=timeout_s, records_max=ROUNDS_MAX):
            yield from self._round(decode_round(record.value), record.offset)

    def close(self) -> None:
        """Let go of the readers."""
        for reader in (self._reader, self._control, self._contents):
            reader.close()

    def _round(self, round_: Round, offset: int) -> Iterator[Traced]:
        ended: list[Ended] = []
        for at, fact in self._control.below(round_.control_next):
            ended += self._courses.fact(at, fact)
        ended += self._courses.round(round_, offset)
        run = self._courses.run
        spans: list[Span] = []
        for one in ended:
            if run is not None:
                spans += self._spans(run, one, sent=offset <= self._after)
        if spans:
            yield Traced(spans=spans, offset=offset)

    def _spans(self, run: RunFacts, ended: Ended, *, sent: bool) -> list[Span]:
        if not isinstance(ended, GroupEnded):
            return [] if sent else step_spans(run, ended)
        why = self._keeper.why(run, ended)
        if sent:
            return []
        if not why:
            self.left_out += 1
            self._contents.forget(ended)
            return []
        self.kept += 1
        contents = self._contents.of(ended)
        return group_spans(run, ended, contents, self._courses.workers, kept=why)


class _Control:
    """Control records, read as far as each round asks."""

    def __init__(self, bus: Bus, at: TopicPartition) -> None:
        self._at = at
        self._reader = bus.reader({at: 0})
        self._ahead: deque[Record] = deque()

    def below(self, position: int) -> Iterator[tuple[int, AnyControl]]:
        """Facts not returned yet with an offset below `position`; what cannot be read is not."""
        empty = 0
        while True:
            while self._ahead and self._ahead[0].offset < position:
                record = self._ahead.popleft()
                with suppress(SchemaError):  # it is among the dead letters
                    fact = decode_control(record.value)
                    if not isinstance(fact, Unknown):
                        yield record.offset, fact
            if self._reader.position(self._at) >= position:
                return
            polled = self._reader.poll(timeout_s=POLL_S if empty else 0.0)
            self._ahead.extend(polled)
            empty = 0 if polled else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"{self._at.topic} has records that do not come")

    def close(self) -> None:
        self._reader.close()


class _Contents:
    """What records of the trajectories topic say, read in one pass beside the rounds."""

    def __init__(self, bus: Bus, topics: Topics) -> None:
        self._bus, self._topic = bus, topics.trajectories
        self._glancer = Glancer()
        self._reader: Reader | None = None
        self._held: OrderedDict[tuple[int, int], Content] = OrderedDict()
        self._unwanted: OrderedDict[tuple[int, int], None] = OrderedDict()
        """Places that need not be kept when they are read: their groups are not traced."""

    def of(self, ended: GroupEnded) -> dict[str, Content]:
        """What the records of a group say, by trajectory; those that are gone are left out."""
        found: dict[str, Content] = {}
        for logged in ended.course.results:
            content = self._at(logged.partition, logged.offset)
            if content is not None:
                found[logged.trajectory] = content
        return found

    def forget(self, ended: GroupEnded) -> None:
        """This group's records are not wanted."""
        for logged in ended.course.results:
            place = logged.partition, logged.offset
            if self._held.pop(place, None) is None:
                self._unwanted[place] = None
                if len(self._unwanted) > HELD_MAX:
                    self._unwanted.popitem(last=False)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _at(self, partition: int, offset: int) -> Content | None:
        at = TopicPartition(self._topic, partition)
        if self._reader is None:
            self._reader = self._open()
        empty = 0
        while self._reader.position(at) <= offset and empty <= EMPTY_POLLS_MAX:
            records = self._reader.poll(
                timeout_s=POLL_S if empty else 0.0, records_max=RECORDS_MAX, bytes_max=BYTES_MAX
            )
            for record in records:
                self._hold(record)
            empty = 0 if records else empty + 1
        found = self._held.pop((partition, offset), None)
        return found if found is not None else self._again(at, offset)

    def _open(self) -> Reader:
        partitions = range(self._bus.partitions(self._topic))
        places = [TopicPartition(self._topic, one) for one in partitions]
        return self._bus.reader({at: self._bus.begin(at) for at in places})

    def _hold(self, record: Record) -> None:
        place = record.partition, record.offset
        if place in self._unwanted:
            del self._unwanted[place]
            return
        content = self._read(record)
        if content is not None:
            self._held[place] = content
            if len(self._held) > HELD_MAX:
                self._held.popitem(last=False)

    def _again(self, at: TopicPartition, offset: int) -> Content | None:
        """A record that was let go before it was named."""
        if offset < self._bus.begin(at):
            return None
        reader = self._bus.reader({at: offset})
        try:
            records = reader.poll(timeout_s=POLL_S, records_max=1)
        finally:
            reader.close()
        if not records or records[0].offset != offset:
            return None
        return self._read(records[0])

    def _read(self, record: Record) -> Content | None:
        if lost_claim(record):
            return None
        with suppress(SchemaError):  # audit says what is wrong with it
            return content_of(self._glancer.glance(record.value))
        return None
