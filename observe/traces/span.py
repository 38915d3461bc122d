"""Spans as values, before any protocol, and the builder of those of one trace.

The builder decides what happens to what is unknown and to clocks that disagree: an attribute that
is not known is left out; a stage that would end before it began ends at once, and none ends after
the orchestrator has known of its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.ids import RunFacts, span_id, step_trace
from dora_pipe.observe.traces.names import KINDS, Kind

Value = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    """Another span that this one has to do with; in another trace, mostly."""

    trace_id: str
    span_id: str
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One span. Times are wall clock ns; ids are hex, `parent_id` is empty for a root.

    Example: ``Span(stage="queued", trace_id="4b..", span_id="00..", parent_id="a2..", start_ns=1,
    end_ns=2, attributes={"dora.version": 3})``.
    """

    stage: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    error: str = ""
    """What went wrong, in words; empty where nothing did."""

    @property
    def kind(self) -> Kind:
        """What OpenTelemetry calls its kind."""
        return KINDS.get(self.stage, "internal")

    @property
    def lasted_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.start_ns) / 1e9


Attributes = dict[str, Value | None]
"""Attributes; None and the empty text are left out."""


def step_span(run: RunFacts, step: int) -> tuple[str, str]:
    """Trace and span id of a training step."""
    trace = step_trace(run.key, step)
    return trace, span_id(trace, "step")


class Cursor:
    """The time up to which something is told: it only goes forward, and not beyond `limit_ns`.

    The limit is the next moment of the orchestrator, whose clock never goes back: what a worker
    said was before that, whatever the worker's clock says.
    """

    __slots__ = ("at_ns", "limit_ns", "skew_ns")

    def __init__(self, at_ns: int, limit_ns: int | None = None) -> None:
        self.at_ns = at_ns
        self.limit_ns = limit_ns
        self.skew_ns = 0
        """Clocks disagreed by so much."""

    def to(self, at_ns: int | None) -> tuple[int, int]:
        """Start and end of a stage that ends then; None: at once."""
        start_ns = self.at_ns
        if at_ns is not None:
            known_ns = at_ns if self.limit_ns is None else min(at_ns, self.limit_ns)
            self.at_ns = max(start_ns, known_ns)
            self.skew_ns = max(self.skew_ns, start_ns - known_ns, at_ns - known_ns)
        return start_ns, self.at_ns


@dataclass(slots=True)
class SpanBuilder:
    """Makes spans of one trace."""

    run: RunFacts
    trace: str
    spans: list[Span] = field(default_factory=list)

    def add(
        self,
        stage: str,
        parent: str,
        times: tuple[int, int],
        attributes: Mapping[str, Value | None],
        *about: str | int,
        events: tuple[Event, ...] = (),
        links: tuple[Link, ...] = (),
        error: str = "",
        error_type: str = "",
    ) -> str:
        """Its id. Attributes that are None or empty are left out."""
        name = span_id(self.trace, stage, *about)
        given = attributes.items()
        known = {key: value for key, value in given if value is not None and value != ""}
        if error:
            known[names.ERROR] = error_type or "error"
        self.spans.append(
            Span(
                stage=stage,
                trace_id=self.trace,
                span_id=name,
                parent_id=parent,
                start_ns=times[0],
                end_ns=times[1],
                attributes=known,
                events=events,
                links=links,
                error=error,
            )
        )
        return name

    def message(self, do: str, kind: str, topic: str) -> Attributes:
        """What every span about records of a topic says."""
        return {
            names.SYSTEM: self.run.system,
            names.DO: do,
            names.DO_TYPE: kind,
            names.TOPIC: topic,
        }


def within(at_ns: int, times: tuple[int, int]) -> int:
    """The moment, or the nearest one of a span."""
    return min(max(at_ns, times[0]), times[1])
