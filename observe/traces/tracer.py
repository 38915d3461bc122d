"""Follow a log and make the traces of what ends in it, while the run lives or years later.

The records of a group's trajectories are read when the group has ended. Memory is bounded by what
is open in the run, and by what one piece of the log ends.

A share of the groups is drawn by their ids, as OpenTelemetry's own sampler does it. Slow groups,
and groups of which something failed or changed its worker, are always traced. This follows from the
log alone: another reader of it traces the same groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from statistics import median_high
from typing import Final, Literal

from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from dora_pipe.bus.base import records_until
from dora_pipe.bus.logged import Damage, fingerprint_of
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.consumers.place_reader import RecordPlace, stretches
from dora_pipe.core.errors import SchemaError
from dora_pipe.ledger.account import Event, GroupEnded, RunAccount, StepEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.traces.ids import RunFacts, group_trace, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import Content, content_of, group_spans, step_spans
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import view_trajectory

GAP: Final = 64
"""Records that are read together though so many lie between them."""

Ended = GroupEnded | StepEnded

Why = Literal["", "all", "ratio", "slow", "failed", "moved"]
"""Why a group is traced; empty: it is not."""

SLOW: Final = 2.0
"""Times the median of the last groups of the same purpose, from which a group is slow."""

RECENT: Final = 64
"""Groups that the median is taken of, ..."""

RECENT_MIN: Final = 8
"""... and the least number of them."""


class SlowGroups:
    """Compare how long each group took with the groups that ended before it."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[int]] = {}

    def is_slow(self, ended: GroupEnded) -> bool:
        """Whether this group is slow; it counts for those that end after it."""
        lasted_ns = ended.ended_ns - ended.group.dispatched_ns
        recent = self._recent.setdefault(ended.group.spec.purpose, deque(maxlen=RECENT))
        slow = len(recent) >= RECENT_MIN and lasted_ns > SLOW * median_high(recent)
        recent.append(lasted_ns)
        return slow


def sampled_because(run: RunFacts, ended: GroupEnded, ratio: float, *, slow: bool) -> Why:
    """Say why a group is traced, where `ratio` of all are; empty if it is not."""
    if ratio >= 1:
        return "all"
    requests = ended.group.requests.values()
    outcomes = {attempt.outcome for request in requests for attempt in request.attempts}
    if ended.fate == "failed" or outcomes & {"failed", "fenced"}:
        return "failed"
    if any(request.moved for request in requests):
        return "moved"
    if slow:
        return "slow"
    trace = int(group_trace(run.key, ended.group.spec.group), 16)
    drawn = TraceIdRatioBased(ratio).should_sample(None, trace, "group").decision
    return "" if drawn is Decision.DROP else "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What one round ended."""

    spans: list[Span]
    offset: int
    """Of the round in decisions: whoever has sent the spans need not see it again."""


class Tracer:
    """The traces of a run, from a log. `ratio`: share of its groups; `after`: rounds up to this
    offset were sent before.

    Example::

        tracer = Tracer(bus, Topics("demo"))
        for traced in tracer.turn():
            sink.send(traced.spans)
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        ratio: float = 1.0,
        *,
        after: int = -1,
        damage: Damage | None = None,
    ) -> None:
        self.damage = damage or Damage()
        """Records of traced groups that are not what was logged: they are told by facts alone."""
        self._after = after
        self._bus, self._topics, self._ratio = bus, topics, ratio
        self._account = RunAccount()
        self._follower = LogFollower(bus, topics, self)
        self._readers: dict[TopicPartition, Reader] = {}
        self._slow = SlowGroups()
        self._events: list[Event] = []
        """Of facts whose round was not told yet."""
        self._rounds: list[tuple[int, list[Event]]] = []
        """What rounds have ended of which nothing was made yet, by their offset."""
        self.caught_up = False
        """The last turn found nothing more."""
        self.run: RunFacts | None = None
        """What `run started` says; None before it."""
        self.sampled = 0
        """Groups that were traced."""
        self.left_out = 0
        """Groups that were not drawn."""

    @property
    def over(self) -> bool:
        """Whether the round that stops the run was read."""
        return self._account.over

    @property
    def open(self) -> int:
        """Groups that have not ended."""
        return len(self._account.open)

    def turn(self) -> Iterator[Traced]:
        """What the next piece of the log ends, round by round. Raises BusError, LogTruncated."""
        self.caught_up = not self._follower.advance()
        rounds, self._rounds = self._rounds, []
        run = self.run
        if run is None:
            return
        chosen = [
            (offset, [*self._chosen(run, events)])
            for offset, events in rounds
            if offset > self._after
        ]
        contents = self._contents(event for _, pairs in chosen for event, _ in pairs)
        for offset, pairs in chosen:
            spans = [
                span for event, why in pairs for span in self._spans(run, event, why, contents)
            ]
            if spans:
                yield Traced(spans=spans, offset=offset)

    def close(self) -> None:
        """Let go of the readers."""
        self._follower.close()
        for reader in self._readers.values():
            reader.close()

    def fact(self, offset: int, fact: AnyControl) -> None:
        self._events += self._account.fact(offset, fact)
        if self.run is None and self._account.started is not None:
            self.run = run_facts(self._account.started)

    def round(self, round_: Round, offset: int) -> None:
        """A round, after the facts that it folds."""
        events, self._events = self._events + self._account.round(round_, offset), []
        if events:
            self._rounds.append((offset, events))

    def _chosen(self, run: RunFacts, events: Iterable[Event]) -> Iterator[tuple[Ended, Why]]:
        """What is traced of these events, and why."""
        for event in events:
            if isinstance(event, StepEnded):
                yield event, "all"
            elif isinstance(event, GroupEnded):
                slow = self._slow.is_slow(event)
                why = sampled_because(run, event, self._ratio, slow=slow)
                self.sampled += bool(why)
                self.left_out += not why
                if why:
                    yield event, why

    def _spans(
        self, run: RunFacts, event: Ended, why: Why, contents: Mapping[str, Content]
    ) -> list[Span]:
        if isinstance(event, StepEnded):
            return step_spans(run, event)
        return group_spans(run, event, contents, sampled=why)

    def _contents(self, events: Iterable[Event]) -> dict[str, Content]:
        """What the records of these groups say, by trajectory; those that are gone, changed or
        another one's are left out, and told in `damage`."""
        named = {
            (logged.partition, logged.offset): logged
            for event in events
            if isinstance(event, GroupEnded)
            for logged in event.group.results
        }
        found: dict[str, Content] = {}
        for record in self._records(RecordPlace(*at) for at in named):
            logged = named.pop((record.partition, record.offset), None)
            if logged is not None and self.damage.is_sound(record, logged):
                with suppress(SchemaError):  # audit says what is wrong with it
                    value = view_trajectory(record.value)
                    known = fingerprint_of(record, value_of=value.trajectory)
                    if value.trajectory == logged.trajectory or self.damage.is_sound(known, logged):
                        found[logged.trajectory] = content_of(value)
        self.damage.look_for_the_rest(named)
        return found

    def _records(self, places: Iterable[RecordPlace]) -> Iterator[Record]:
        """The records at these places that are there, and those between."""
        for stretch in stretches(places, GAP):
            (partition, first), (_, last) = stretch[0], stretch[-1]
            at = TopicPartition(self._topics.trajectories, partition)
            if at not in self._readers:
                self._readers[at] = self._bus.reader({at: first})
            reader = self._readers[at]
            reader.seek(at, first)
            yield from records_until(reader, {at: min(last + 1, self._bus.end(at))})
