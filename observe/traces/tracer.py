"""Follow a log and build the traces of ended groups and steps.

Memory is bounded by open groups and one piece of the log. Groups are sampled by id, as in
OpenTelemetry; slow, failed and migrated groups are always traced. All readers of a log trace the
same groups.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_high
from typing import Final, Literal

from opentelemetry.sdk.trace.sampling import Decision, TraceIdRatioBased

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, PlaceReader
from dora_pipe.ledger.account import GroupEnded, LedgerEvent, RunAccount, StepEnded
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.traces.ids import RunFacts, group_trace, run_facts
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.spans import contents_of, group_spans, step_spans
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.rounds import Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory

Ended = GroupEnded | StepEnded

Why = Literal["", "all", "ratio", "slow", "failed", "migrated"]
"""Reason for tracing a group; empty: not traced."""

SLOW: Final = 2.0
"""Multiple of the median duration for the same purpose."""

RECENT: Final = 64
RECENT_MIN: Final = 8


class SlowGroups:
    """Compare the duration of a group with earlier groups."""

    def __init__(self) -> None:
        self._recent: dict[str, deque[int]] = {}

    def is_slow(self, ended: GroupEnded) -> bool:
        """Return whether a group is slow, then include it in the median."""
        lasted_ns = ended.ended_ns - ended.group.dispatched_ns
        recent = self._recent.setdefault(ended.group.spec.purpose, deque(maxlen=RECENT))
        slow = len(recent) >= RECENT_MIN and lasted_ns > SLOW * median_high(recent)
        recent.append(lasted_ns)
        return slow


def sampled_because(run: RunFacts, ended: GroupEnded, ratio: float, *, slow: bool) -> Why:
    """Return why a group is traced when sampling at `ratio`; empty if it is not."""
    if ratio >= 1:
        return "all"
    requests = ended.group.requests.values()
    outcomes = {attempt.outcome for request in requests for attempt in request.attempts}
    if ended.outcome == "failed" or outcomes & {"failed", "fenced"}:
        return "failed"
    if any(request.moved for request in requests):
        return "migrated"
    if slow:
        return "slow"
    trace = int(group_trace(run.key, ended.group.spec.group), 16)
    drawn = TraceIdRatioBased(ratio).should_sample(None, trace, "group").decision
    return "" if drawn is Decision.DROP else "ratio"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Spans that ended in one round."""

    spans: list[Span]
    offset: int
    """Offset of the round in decisions; resume after it."""


class Tracer:
    """Traces of a run from its log.

    `ratio` is the sampled share of groups, `after` the offset of the last exported round.

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
        """Damaged records of traced groups; their spans use facts only."""
        self._after = after
        self._ratio = ratio
        self._account = RunAccount()
        self._follower = LogFollower(bus, topics, self)
        self._places = PlaceReader(bus, topics.trajectories)
        self._slow = SlowGroups()
        self._events: list[LedgerEvent] = []
        self._rounds: list[tuple[int, list[LedgerEvent]]] = []
        """Ended events by round offset, without spans yet."""
        self.caught_up = False
        """The last turn reached the end of the log."""
        self.run: RunFacts | None = None
        self.sampled = 0
        self.left_out = 0

    @property
    def over(self) -> bool:
        return self._account.over

    @property
    def open(self) -> int:
        return len(self._account.open)

    def turn(self) -> Iterator[Traced]:
        """Yield what the next piece of the log ends, by round. Raises BusError, LogTruncated."""
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
        named = (
            logged
            for _, pairs in chosen
            for event, _ in pairs
            if isinstance(event, GroupEnded)
            for logged in event.group.results
        )
        contents = contents_of(self._places, named, self.damage)
        for offset, pairs in chosen:
            spans = [
                span for event, why in pairs for span in self._spans(run, event, why, contents)
            ]
            if spans:
                yield Traced(spans=spans, offset=offset)

    def close(self) -> None:
        self._follower.close()
        self._places.close()

    def fact(self, offset: int, fact: AnyControl) -> None:
        self._events += self._account.fact(offset, fact)
        if self.run is None and self._account.started is not None:
            self.run = run_facts(self._account.started)

    def round(self, round_: Round, offset: int) -> None:
        events, self._events = self._events + self._account.round(round_, offset), []
        if events:
            self._rounds.append((offset, events))

    def _chosen(self, run: RunFacts, events: Iterable[LedgerEvent]) -> Iterator[tuple[Ended, Why]]:
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
        self, run: RunFacts, event: Ended, why: Why, contents: Mapping[str, Trajectory]
    ) -> list[Span]:
        if isinstance(event, StepEnded):
            return step_spans(run, event)
        return group_spans(run, event, contents, sampled=why)
