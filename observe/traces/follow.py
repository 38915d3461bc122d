"""Export the traces of a live or finished run.

Nothing is buffered or dropped: while the endpoint is unreachable, the reader keeps its position. A
stored position prevents duplicates after a resume. After the run, the first failed request ends the
export.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage
from dora_pipe.core.errors import BusError, ResourceError, TopicMissing
from dora_pipe.core.loop.run_lifecycle import run_is_over
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.observe.following import Checkpoint, follow_log
from dora_pipe.observe.traces.sinks import SPANS_MAX, NotTaken, Sink
from dora_pipe.observe.traces.span import Span
from dora_pipe.observe.traces.tracer import Traced, Tracer
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

FLUSH_SPANS: Final = 4 * SPANS_MAX
"""Spans sent together while following; bounds the memory."""

RETRY_S: Final = 5.0


@dataclass(slots=True, kw_only=True)
class Sent:
    groups: int = 0
    left_out: int = 0
    """Groups that were not sampled."""
    spans: int = 0
    open: int = 0
    whole: bool = False
    """All spans of the run were sent."""
    damage: Damage = field(default_factory=Damage)


class TraceSender:
    """Export the traces of one run; `ratio` is the sampled share of groups."""

    def __init__(
        self,
        bus: Bus,
        topics: Topics,
        sink: Sink,
        *,
        clock: Clock,
        ratio: float = 1.0,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self._bus, self._topics, self._sink, self._ratio = bus, topics, sink, ratio
        self._clock, self._checkpoint = clock, checkpoint or Checkpoint(None)
        before = self._checkpoint.read()
        self._after: int = -1 if before is None else before
        self._traced: Iterator[Traced] = iter(())
        self._spans: list[Span] = []
        """Unsent spans up to the round at `_offset`."""
        self._offset = self._after
        self._sent = Sent()
        self._said = ""

    def whole(self) -> Sent:
        """Export all ended traces. Raises ResourceError, errors of the log."""
        with closing(self._opened()) as tracer:
            while not tracer.caught_up:
                self._traced = tracer.turn()
                self._send(tracer, flush=1)
            self._sent.open, self._sent.whole = tracer.open, True
        return self._sent

    def follow(self, stop: Callable[[], bool] = lambda: False) -> Sent:
        """Export until the run ends or `stop` returns True, retrying while unreachable. Raises
        LogTruncated, SchemaError."""

        def turn(tracer: Tracer) -> bool:
            while True:
                self._traced = tracer.turn()
                while not self._sends(tracer):
                    if stop() or self._is_over():
                        return True
                    self._clock.sleep(RETRY_S)
                if tracer.caught_up:
                    self._sent.whole = tracer.over
                if tracer.caught_up or stop():
                    return tracer.over or stop()

        def away(error: BusError) -> bool:
            early = isinstance(error, TopicMissing)
            run = self._topics.run
            self._say(f"the log has no run {run}" if early else f"the log is away: {error.message}")
            return stop() or self._is_over()

        follow_log(self._opened, turn, clock=self._clock, away=away)
        return self._sent

    def _opened(self) -> Tracer:
        self._spans = []
        return Tracer(
            self._bus, self._topics, self._ratio, after=self._after, damage=self._sent.damage
        )

    def _sends(self, tracer: Tracer) -> bool:
        try:
            self._send(tracer, flush=FLUSH_SPANS)
        except ResourceError as error:
            self._say(error.message)
            return False
        return True

    def _send(self, tracer: Tracer, *, flush: int) -> None:
        damaged = len(tracer.damage.lines)
        for traced in self._traced:
            self._spans += traced.spans
            self._offset = traced.offset
            if len(self._spans) >= flush:
                self._flush(tracer)
        if self._spans:
            self._flush(tracer)
        for line in tracer.damage.lines[damaged:]:
            LOG.warning("%s", line)
        self._sent.groups += tracer.sampled
        self._sent.left_out += tracer.left_out
        tracer.sampled = tracer.left_out = 0

    def _flush(self, tracer: Tracer) -> None:
        assert tracer.run is not None, "spans of a run that has not started"
        try:
            self._sink.send(tracer.run, self._spans)
        except NotTaken as error:
            self._sent.spans += error.taken
            del self._spans[: error.taken]
            raise
        self._sent.spans += len(self._spans)
        self._spans, self._after, self._said = [], self._offset, ""
        self._checkpoint.write(self._offset)

    def _say(self, why: str) -> None:
        if why != self._said:
            LOG.warning("traces wait: %s", why)
            self._said = why

    def _is_over(self) -> bool:
        partition = TopicPartition(self._topics.decisions, 0)
        try:
            return run_is_over(self._bus, self._topics, self._bus.end(partition), self._clock)
        except BusError:
            return False
