"""Spans independent of protocols, and a builder for the spans of a trace.

To tolerate clock skew, a stage that would end before its start has zero length, and none ends after
the orchestrator knew of its end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dora_pipe.observe.traces import names
from dora_pipe.observe.traces.ids import RunFacts, span_id, step_trace
from dora_pipe.observe.traces.names import KINDS, Kind

Value = str | bool | int | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SpanEvent:
    name: str
    at_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Link:
    trace_id: str
    span_id: str
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Span with wall clock ns and hex ids; `parent_id` is empty for a root."""

    stage: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: Sequence[SpanEvent] = ()
    links: Sequence[Link] = ()
    error: str = ""

    @property
    def kind(self) -> Kind:
        return KINDS.get(self.stage, "internal")

    @property
    def lasted_s(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


Attributes = dict[str, Value | None]


def step_span(run: RunFacts, step: int) -> tuple[str, str]:
    """Return the (trace, span) ids of a training step."""
    trace = step_trace(run.key, step)
    return trace, span_id(trace, "step")


class Cursor:
    """Monotonic end of the emitted stages, at most `limit_ns`.

    The limit is the next moment of the orchestrator, whose clock is monotonic.
    """

    __slots__ = ("at_ns", "limit_ns", "skew_ns")

    def __init__(self, at_ns: int, limit_ns: int | None = None) -> None:
        self.at_ns = at_ns
        self.limit_ns = limit_ns
        self.skew_ns = 0

    def to(self, at_ns: int | None) -> tuple[int, int]:
        """Return start and end of a stage that ends at `at_ns`; None: zero length."""
        start_ns = self.at_ns
        if at_ns is not None:
            known_ns = at_ns if self.limit_ns is None else min(at_ns, self.limit_ns)
            self.at_ns = max(start_ns, known_ns)
            self.skew_ns = max(self.skew_ns, start_ns - known_ns, at_ns - known_ns)
        return start_ns, self.at_ns


@dataclass(slots=True)
class SpanBuilder:
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
        events: tuple[SpanEvent, ...] = (),
        links: tuple[Link, ...] = (),
        error: str = "",
        error_type: str = "",
    ) -> str:
        """Add a span and return its id. None and empty attributes are omitted."""
        name = span_id(self.trace, stage, *about)
        given = attributes.items()
        present = {key: value for key, value in given if value is not None and value != ""}
        if error:
            present[names.ERROR] = error_type or "error"
        self.spans.append(
            Span(
                stage=stage,
                trace_id=self.trace,
                span_id=name,
                parent_id=parent,
                start_ns=times[0],
                end_ns=times[1],
                attributes=present,
                events=events,
                links=links,
                error=error,
            )
        )
        return name

    def message(self, do: str, kind: str, topic: str) -> Attributes:
        return {
            names.SYSTEM: self.run.system,
            names.DO: do,
            names.DO_TYPE: kind,
            names.TOPIC: topic,
        }


def within(at_ns: int, times: tuple[int, int]) -> int:
    return min(max(at_ns, times[0]), times[1])
