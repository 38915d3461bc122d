"""Makes spans of one trace; it decides what happens to what is unknown and to clocks that disagree.

An attribute that is not known is left out. A stage that would end before it began ends at once,
and none ends after the orchestrator has known of its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dora_pipe.telemetry import names
from dora_pipe.telemetry.course import RunFacts
from dora_pipe.telemetry.ids import group_trace, span_id, step_trace
from dora_pipe.telemetry.span import Event, Link, Span, Value

Said = dict[str, Value | None]
"""Attributes; None and the empty text are left out."""


def root_of(run: RunFacts, group: str) -> tuple[str, str]:
    """Trace and span id of a group."""
    trace = group_trace(run.key, group)
    return trace, span_id(trace, "group")


def trajectory_span(run: RunFacts, group: str, trajectory: str) -> tuple[str, str]:
    """Trace and span id of a trajectory."""
    trace = group_trace(run.key, group)
    return trace, span_id(trace, "trajectory", trajectory)


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
class Maker:
    """Makes spans of one trace."""

    run: RunFacts
    trace: str
    made: list[Span] = field(default_factory=list)

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
        said = {key: value for key, value in given if value is not None and value != ""}
        if error:
            said[names.ERROR] = error_type or "error"
        self.made.append(
            Span(
                stage=stage,
                trace_id=self.trace,
                span_id=name,
                parent_id=parent,
                start_ns=times[0],
                end_ns=times[1],
                attributes=said,
                events=events,
                links=links,
                error=error,
            )
        )
        return name

    def message(self, do: str, kind: str, topic: str) -> Said:
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
