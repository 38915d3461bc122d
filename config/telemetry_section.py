"""The section of a configuration that says what a run tells the outside of itself."""

from __future__ import annotations

from dora_pipe.config.section import PositiveFloat, Section, Share


class Telemetry(Section, frozen=True, kw_only=True):
    """What a run tells the outside of itself, beside its log (docs/reference/traces.md)."""

    traces: str = "off"
    """`off`, or the address of an endpoint that takes OTLP over HTTP, such as
    http://127.0.0.1:4318: `run` then starts a process that follows the log and sends traces."""
    traces_ratio: Share = 0.1
    """Share of groups whose traces are sent. Slow groups, and those of which something failed or
    changed its worker, are sent whatever it is."""
    traces_slow: PositiveFloat = 2.0
    """A group is slow when it took so many times as long as the median of the 64 before it."""
