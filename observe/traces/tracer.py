"""Follows a log and makes the traces of what ends in it; it decides when a reader gives up.

Everybody who wants the traces of a whole log goes through here, while the run lives or years later.
Of the trajectories topic one pass is read; what is told of records waits until its group ends.
Memory is bounded by what is open, and by `HELD_MAX` records that nobody has named.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.base import count_empty_polls
from dora_pipe.bus.logged import Damage, RecordFingerprint, fingerprint_of
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.catalogue.account import Event, GroupEnded, RunAccount, StepEnded
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.errors import SchemaError
from dora_pipe.observe.traces.ids import RunFacts, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import Content, content_of, group_spans, step_spans
from dora_pipe.observe.traces.trace_sampling import SamplingPolicy, TailSampler, Why
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import view_trajectory

POLL_S: Final = 1.0
"""One wait for records that are known to be there."""

EMPTY_POLLS_MAX: Final = 30
"""So many waits in vain, one after the other, and the log counts as unreachable."""

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

        tracer = Tracer(bus, Topics("demo"), SamplingPolicy())
        for traced in tracer.turn():
            sink.send(traced.spans)
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        policy: SamplingPolicy,
        *,
        after: int = -1,
        damage: Damage | None = None,
    ) -> None:
        self.damage = damage or Damage()
        """Records of traced groups that are not what was logged: they are told by facts alone."""
        self._after = after
        self._sampler = TailSampler(policy)
        self._account = RunAccount()
        self._follower = LogFollower(bus, topics, self)
        self._contents = _Contents(bus, topics, self.damage)
        self._events: list[Event] = []
        """Of facts whose round was not told yet."""
        self._rounds: list[tuple[int, list[Event]]] = []
        """What rounds have ended of which nothing was made yet, by their offset."""
        self._caught_up = False
        self.run: RunFacts | None = None
        """What `run started` says; None before it."""
        self.sampled = 0
        """Groups that were traced."""
        self.left_out = 0
        """Groups that were not, by the policy."""

    @property
    def over(self) -> bool:
        """Whether the round that stops the run was read."""
        return self._account.over

    @property
    def open(self) -> int:
        """Groups that have not ended."""
        return len(self._account.open)

    @property
    def caught_up(self) -> bool:
        """Whether the last turn found nothing more."""
        return self._caught_up

    def turn(self) -> Iterator[Traced]:
        """What the next piece of the log ends, round by round. Raises BusError, LogTruncated."""
        self._caught_up = not self._follower.advance()
        rounds, self._rounds = self._rounds, []
        for offset, events in rounds:
            if self.run is not None:
                made = (self._spans(self.run, one, sent=offset <= self._after) for one in events)
                spans = [span for few in made for span in few]
                if spans:
                    yield Traced(spans=spans, offset=offset)

    def close(self) -> None:
        """Let go of the readers."""
        self._follower.close()
        self._contents.close()

    def fact(self, offset: int, fact: AnyControl) -> None:
        self._events += self._account.fact(offset, fact)
        if self.run is None and self._account.started is not None:
            self.run = run_facts(self._account.started)

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        events, self._events = self._events + self._account.round(round_, offset), []
        if events:
            self._rounds.append((offset, events))

    def _spans(self, run: RunFacts, event: Event, *, sent: bool) -> list[Span]:
        match event:
            case GroupEnded():
                why = self._sampler.why(run, event)
                return [] if sent else self._group_spans(run, event, why)
            case StepEnded() if not sent:
                return step_spans(run, event)
            case _:
                return []

    def _group_spans(self, run: RunFacts, ended: GroupEnded, why: Why) -> list[Span]:
        if not why:
            self.left_out += 1
            self._contents.forget(ended)
            return []
        self.sampled += 1
        contents = self._contents.of(ended)
        return group_spans(run, ended, contents, self._account.workers, sampled=why)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A record that was read: what holds it against control, and what it says if that is known."""

    fingerprint: RecordFingerprint
    content: Content | None


class _Contents:
    """What records of the trajectories topic say, read in one pass beside the rounds."""

    def __init__(self, bus: Bus, topics: Topics, damage: Damage) -> None:
        self._bus, self._topic = bus, topics.trajectories
        self._damage = damage
        self._reader: Reader | None = None
        self._held: OrderedDict[tuple[int, int], _Seen] = OrderedDict()

    def of(self, ended: GroupEnded) -> dict[str, Content]:
        """What the records of a group say, by trajectory; those that are gone, changed or another
        one's are left out, and told in `damage`."""
        found: dict[str, Content] = {}
        for logged in ended.group.results:
            seen = self._at(logged.partition, logged.offset)
            sound = self._damage.is_sound(None if seen is None else seen.fingerprint, logged)
            if sound and seen is not None and seen.content is not None:
                found[logged.trajectory] = seen.content
        return found

    def forget(self, ended: GroupEnded) -> None:
        """This group's records are not wanted."""
        for logged in ended.group.results:
            self._held.pop((logged.partition, logged.offset), None)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _at(self, partition: int, offset: int) -> _Seen | None:
        at = TopicPartition(self._topic, partition)
        if self._reader is None:
            self._reader = self._open()
        empty = 0
        while self._reader.position(at) <= offset:
            records = self._reader.poll(
                timeout_s=POLL_S if empty else 0.0, records_max=RECORDS_MAX, bytes_max=BYTES_MAX
            )
            for record in records:
                self._hold(record)
            if not records and offset >= self._bus.end(at):
                break  # it was cut
            empty = count_empty_polls(
                self._reader, at, empty, moved=bool(records), polls_max=EMPTY_POLLS_MAX
            )
        found = self._held.pop((partition, offset), None)
        return found if found is not None else self._again(at, offset)

    def _open(self) -> Reader:
        partitions = range(self._bus.partitions(self._topic))
        places = [TopicPartition(self._topic, one) for one in partitions]
        return self._bus.reader({at: self._bus.begin(at) for at in places})

    def _hold(self, record: Record) -> None:
        self._held[record.partition, record.offset] = self._read(record)
        if len(self._held) > HELD_MAX:
            self._held.popitem(last=False)

    def _again(self, at: TopicPartition, offset: int) -> _Seen | None:
        """A record that was let go before it was named; None for one that is not there."""
        if not self._bus.begin(at) <= offset < self._bus.end(at):
            return None
        with closing(self._bus.reader({at: offset})) as reader:
            records: list[Record] = []
            empty = 0
            while not records and reader.position(at) <= offset:
                records = reader.poll(timeout_s=POLL_S, records_max=1)
                empty = count_empty_polls(
                    reader, at, empty, moved=bool(records), polls_max=EMPTY_POLLS_MAX
                )
        return self._read(records[0]) if records and records[0].offset == offset else None

    def _read(self, record: Record) -> _Seen:
        with suppress(SchemaError):  # audit says what is wrong with it
            value = view_trajectory(record.value)
            return _Seen(fingerprint_of(record, value_of=value.trajectory), content_of(value))
        return _Seen(fingerprint_of(record), None)
