"""What a run's version is worth by a probe, beside another's: by pairs of the same row and seed."""

from __future__ import annotations

from dataclasses import dataclass

from dora_pipe.audit.bisect import Values, paired
from dora_pipe.catalogue.evaluations import Interval, interval_of
from dora_pipe.core.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Learnt:
    """Two versions by the draws that have a value under both.

    Example: ``Learnt(draws=256, value=Interval(value=.91, low=.88, high=.93), ...)``
    """

    draws: int
    value: Interval
    """Mean, and its 95 % interval: rows are those that there are, seeds are what is random."""
    source: Interval
    """Of the other version, likewise."""
    gain: Interval
    """Value over the other's, draw by draw."""


def learnt(values: Values, source: Values) -> Learnt:
    """Compare two versions. Raises UsageError where no draw has a value under both."""
    if not any(None not in pair for pair in zip(values, source, strict=False)):
        raise UsageError("the probe has no value that two versions can be compared by")
    rows = paired(values, source)
    return Learnt(
        draws=len(rows),
        value=interval_of([own for own, _ in rows]),
        source=interval_of([other for _, other in rows]),
        gain=interval_of([own - other for own, other in rows]),
    )
