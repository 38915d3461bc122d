"""Send the traces of a run, while it lives or when it is over.

The log is the truth, so nothing is buffered and nothing is dropped: while the endpoint is away the
follower stands still in the log. It remembers how far it has sent, so a run that is resumed sends
nothing twice. When the run is over it no longer waits for an endpoint that is away; on any later
day `dora-pipe export traces` sends the rest, under the same ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.catalogue.reading import last_round
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, ResourceError, TopicMissing
from dora_pipe.observe.following import Checkpoint, follow_log
from dora_pipe.observe.traces.sinks import SPANS_MAX, NotTaken, Sink
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.trace_sampling import SamplingPolicy
from dora_pipe.observe.traces.tracer import Tracer
from dora_pipe.schemas.rounds import StopRun
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

FLUSH_SPANS: Final = 4 * SPANS_MAX
"""Spans that are sent without waiting for the end of a look; the bound of what is in memory."""

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 5.0
"""Time between two tries while the endpoint is away; it doubles with each."""

LEAVE_S: Final = 20.0
"""A follower that is asked to end continues to send for this time at most."""


@dataclass(slots=True, kw_only=True)
class Sent:
    """Counts of what was sent."""

    groups: int = 0
    left_out: int = 0
    """Groups that are not traced, by the policy."""
    spans: int = 0
    open: int = 0
    """Groups that have not ended."""
    whole: bool = False
    """Everything was sent that will be in the log."""
    damage: Damage = field(default_factory=Damage)
    """Trajectories whose records are not what was logged: their traces have no times of theirs."""


class TraceSender:
    """Sends the traces of one run to a sink.

    Example: ``TraceSender(bus, topics, sink, SamplingPolicy(), clock=SystemClock()).whole()``
    """

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        sink: Sink,
        policy: SamplingPolicy,
        *,
        clock: Clock,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._bus, self._topics, self._sink, self._policy = bus, topics, sink, policy
        self._clock, self._checkpoint = clock, checkpoint or Checkpoint(None)
        before = self._checkpoint.read()
        self._after: int = -1 if before is None else before
        """Offset of the last round whose traces were sent."""
        self._sent = Sent()
        self._said = ""

    def whole(self) -> Sent:
        """Send everything that has ended in the log. Raises ResourceError, the log's errors."""
        with closing(self._opened()) as tracer:
            while not tracer.caught_up:
                self._turn(tracer, self._send, flush=1)
            self._sent.open, self._sent.whole = tracer.open, True
        return self._sent

    def follow(self, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Send until the run is over or `stop` says so, and wait for what is away.

        Raises LogTruncated, SchemaError for a log that cannot be followed.
        """
        leave = _Leave(self._clock, stop)

        def send(tracer: Tracer, spans: list[Span], offset: int) -> bool:
            return self._send_patiently(leave, tracer, spans, offset)

        def turn(tracer: Tracer) -> bool:
            while True:
                if not self._turn(tracer, send, flush=FLUSH_SPANS):
                    return True
                if tracer.caught_up:
                    self._sent.whole = tracer.over
                    return tracer.over or stop()
                if leave.is_late(tracer.over):
                    return True

        def away(error: BusError) -> bool:
            early = isinstance(error, TopicMissing)
            run = self._topics.run
            self._say(f"the log has no run {run}" if early else f"the log is away: {error.message}")
            return leave.now() or self._is_over()

        follow_log(self._opened, turn, clock=self._clock, away=away)
        return self._sent

    def _opened(self) -> Tracer:
        damage = self._sent.damage
        return Tracer(self._bus, self._topics, self._policy, after=self._after, damage=damage)

    def _turn(
        self,
        tracer: Tracer,
        send: Callable[[Tracer, list[Span], int], bool],
        *,
        flush: int,
    ) -> bool:
        """Send what the next rounds ended, `flush` spans at a time or at the end of the turn.

        Returns False when it could not be sent and time is up.
        """
        spans: list[Span] = []
        offset = self._after
        left_out, sampled = tracer.left_out, tracer.sampled
        damaged = len(tracer.damage.lines)
        for traced in tracer.turn():
            spans += traced.spans
            offset = traced.offset
            if len(spans) >= flush:
                if not send(tracer, spans, offset):
                    return False
                spans = []
        for line in tracer.damage.lines[damaged:]:
            LOG.warning("%s", line)
        self._sent.left_out += tracer.left_out - left_out
        self._sent.groups += tracer.sampled - sampled
        return not spans or send(tracer, spans, offset)

    def _send(self, tracer: Tracer, spans: list[Span], offset: int) -> bool:
        """Send spans up to a round. Raises ResourceError; those that were taken are counted."""
        assert tracer.run is not None, "spans of a run that has not started"
        try:
            self._sink.send(tracer.run, spans)
        except NotTaken as error:
            self._sent.spans += error.taken
            del spans[: error.taken]
            raise
        self._sent.spans += len(spans)
        self._after, self._said = offset, ""
        self._checkpoint.write(offset)
        return True

    def _send_patiently(
        self, leave: _Leave, tracer: Tracer, spans: list[Span], offset: int
    ) -> bool:
        """Send spans, however long the endpoint is away; False when the follower has to end."""
        retry_s = RETRY_FIRST_S
        while True:
            try:
                return self._send(tracer, spans, offset)
            except ResourceError as error:
                self._say(error.message)
            if leave.now() or self._is_over():
                return False
            self._clock.sleep(retry_s)
            retry_s = min(2 * retry_s, RETRY_MAX_S)

    def _say(self, why: str) -> None:
        if why != self._said:
            LOG.warning("traces wait: %s", why)
            self._said = why

    def _is_over(self) -> bool:
        """Whether the run is over, however far the follower has read."""
        try:
            return is_over(self._bus, self._topics)
        except BusError:
            return False


class _Leave:
    """The time that a follower has which is asked to end."""

    def __init__(self, clock: Clock, stop: Callable[[], bool]) -> None:
        self._clock, self.now = clock, stop
        self._until_ns: int | None = None

    def is_late(self, over: bool) -> bool:
        """Whether that time is up; it begins when the run is over, or with the request to end."""
        now_ns = self._clock.now_ns()
        if self._until_ns is None and (over or self.now()):
            self._until_ns = now_ns + int(LEAVE_S * 1e9)
        return self._until_ns is not None and now_ns >= self._until_ns


def is_over(bus: Bus, topics: Topics) -> bool:
    """Whether the last round there is stops the run. Raises BusError."""
    last = last_round(bus, topics, bus.end(TopicPartition(topics.decisions, 0)))
    return last is not None and any(isinstance(one, StopRun) for one in last.decisions)
