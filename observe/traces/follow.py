"""Sends the traces of a run while it lives; it decides when to wait, and when to give up.

The log is the truth, so nothing is buffered and nothing is dropped: while the endpoint is away the
follower stands still in the log. It remembers how far it has sent, so a run that is resumed sends
nothing twice. When the run is over it gives what is left a bounded time; on any later day
`dora-pipe export traces` sends everything, under the same ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.bus.logged import Damage
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.catalogue.reading import last_round
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, LogTruncated, ResourceError, TopicMissing
from dora_pipe.observe.traces.ids import RunFacts
from dora_pipe.observe.traces.sinks import SPANS_MAX, NotTaken, Sink, jittered
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.trace_sampling import SamplingPolicy
from dora_pipe.observe.traces.tracer import Tracer
from dora_pipe.schemas.rounds import StopRun
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

TURN_S: Final = 1.0
"""Between two looks at the log: traces come so late at least."""

FLUSH_SPANS: Final = 4 * SPANS_MAX
"""So many are sent without waiting for the end of a look; the bound of what is in memory."""

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 5.0
"""Between two tries, while log or endpoint are away: twice as long each time."""

RETRY_AFTER_MAX_S: Final = 600.0
"""An endpoint that asks to be left alone for longer is asked again after so long."""

LEAVE_S: Final = 20.0
"""When the run is over or the follower is asked to end, it goes on sending for so long at most; it
does not wait any more for what is away."""


class Checkpoint:
    """A file that remembers the last round whose traces were sent; without a path, nothing does."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def read(self) -> int:
        """Offset of the round in decisions; -1 where nothing was sent."""
        if self.path is None:
            return -1
        with suppress(OSError, ValueError):
            return int(self.path.read_text())
        return -1

    def write(self, offset: int) -> None:
        """Remember, all or nothing; a disk that is full costs a trace sent twice, no more."""
        if self.path is not None:
            unfinished = self.path.with_name(f"{self.path.name}.tmp")
            with suppress(OSError):
                unfinished.parent.mkdir(parents=True, exist_ok=True)
                unfinished.write_text(f"{offset}\n")
                unfinished.replace(self.path)


@dataclass(slots=True, kw_only=True)
class Sent:
    """What a follower has done."""

    groups: int = 0
    left_out: int = 0
    """Groups that are not traced, by the policy."""
    spans: int = 0
    whole: bool = False
    """The run is over and everything was sent."""
    damage: Damage = field(default_factory=Damage)
    """Trajectories whose records are not what was logged: their traces have no times of theirs."""


class Follower:
    """Follows one run until it is over or `stop` says so. Example: ``Follower(...).run()``."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        sink: Sink,
        policy: SamplingPolicy,
        *,
        clock: Clock,
        stop: Callable[[], bool] = lambda: False,
        checkpoint: Checkpoint | None = None,
        chance: Callable[[], float] = lambda: 0.5,
    ) -> None:
        """`chance` is uniform in [0, 1), and varies the pauses."""
        self._bus, self._topics, self._sink, self._policy = bus, topics, sink, policy
        self._clock, self._stop, self._checkpoint = clock, stop, checkpoint or Checkpoint(None)
        self._after = self._checkpoint.read()
        self._sent = Sent()
        self._leave_ns: int | None = None
        self._retry_s = RETRY_FIRST_S
        self._chance = chance
        self._said = ""

    def run(self) -> Sent:
        """Until the end. Raises LogTruncated, SchemaError for a log that cannot be followed."""
        while True:
            tracer = None
            try:
                tracer = Tracer(
                    self._bus,
                    self._topics,
                    self._policy,
                    after=self._after,
                    damage=self._sent.damage,
                )
                if self._follow(tracer):
                    return self._sent
            except LogTruncated:
                raise
            except TopicMissing:
                if not self._wait(f"the log has no run {self._topics.run}"):
                    return self._sent
            except BusError as error:
                if not self._wait(f"the log is away: {error.message}"):
                    return self._sent
            finally:
                if tracer is not None:
                    tracer.close()

    def _follow(self, tracer: Tracer) -> bool:
        """Whether that was all, or has to be; a failing log raises."""
        while True:
            if not self._turn(tracer):
                return True
            behind = not tracer.caught_up
            if tracer.over and not behind:
                self._sent.whole = True
                return True
            if self._late(leaving=self._stop() or tracer.over) or (self._stop() and not behind):
                return True
            if not behind:
                self._clock.sleep(TURN_S)

    def _turn(self, tracer: Tracer) -> bool:
        """Send what the next rounds ended; False when it could not be sent and time is up."""
        spans: list[Span] = []
        offset = self._after
        left_out, sampled = tracer.left_out, tracer.sampled
        damaged = len(tracer.damage.lines)
        for traced in tracer.turn():
            spans += traced.spans
            offset = traced.offset
            if len(spans) >= FLUSH_SPANS:
                if not self._send(tracer.run, spans, offset):
                    return False
                spans = []
        for line in tracer.damage.lines[damaged:]:
            LOG.warning("%s", line)
        self._sent.left_out += tracer.left_out - left_out
        self._sent.groups += tracer.sampled - sampled
        return not spans or self._send(tracer.run, spans, offset)

    def _send(self, run: RunFacts | None, spans: list[Span], offset: int) -> bool:
        assert run is not None, "spans of a run that has not started"
        while True:
            try:
                self._sink.send(run, spans)
            except ResourceError as error:
                taken = error.taken if isinstance(error, NotTaken) else 0
                self._sent.spans += taken
                spans = spans[taken:]
                if not self._wait(error.message, error):
                    return False
                continue
            self._retry_s, self._said = RETRY_FIRST_S, ""
            self._sent.spans += len(spans)
            self._after = offset
            self._checkpoint.write(offset)
            return True

    def _wait(self, why: str, error: ResourceError | None = None) -> bool:
        """Wait before another try; False when nobody has time for one."""
        if why != self._said:
            LOG.warning("traces wait: %s", why)
            self._said = why
        due_ns = self._clock.now_ns() + int(self._pause_s(error) * 1e9)
        self._retry_s = min(2 * self._retry_s, RETRY_MAX_S)
        busy = isinstance(error, NotTaken) and error.busy
        while True:
            leaving = self._stop() or self._is_over()
            if leaving and (not busy or self._late(leaving=True)):
                return False
            left_s = (due_ns - self._clock.now_ns()) / 1e9
            if left_s <= 0:
                return True
            self._clock.sleep(min(left_s, RETRY_MAX_S))

    def _pause_s(self, error: ResourceError | None) -> float:
        """As long as the endpoint asks for, else twice as long each time."""
        answer = error.answer if isinstance(error, NotTaken) else None
        asked_s = answer.retry_after_s(self._clock.wall_ns()) if answer is not None else None
        if asked_s is None:
            return jittered(self._retry_s, self._chance)
        return min(max(asked_s, RETRY_FIRST_S), RETRY_AFTER_MAX_S)

    def _is_over(self) -> bool:
        """Whether the run is, however far the follower has come."""
        try:
            return is_over(self._bus, self._topics)
        except BusError:
            return False  # nobody knows

    def _late(self, *, leaving: bool) -> bool:
        """Whether the time is up that whoever leaves has."""
        now_ns = self._clock.now_ns()
        if self._leave_ns is None and leaving:
            self._leave_ns = now_ns + int(LEAVE_S * 1e9)
        return self._leave_ns is not None and now_ns >= self._leave_ns


def is_over(bus: Bus, topics: Topics) -> bool:
    """Whether the last round there is stops the run. Raises BusError."""
    last = last_round(bus, topics, bus.end(TopicPartition(topics.decisions, 0)))
    return last is not None and any(isinstance(one, StopRun) for one in last.decisions)
