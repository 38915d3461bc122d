"""A span as a value, before any protocol; it decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dora_pipe.telemetry.names import STAGES, Kind

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
        return STAGES[self.stage].kind

    @property
    def lasted_s(self) -> float:
        """Seconds."""
        return (self.end_ns - self.start_ns) / 1e9
