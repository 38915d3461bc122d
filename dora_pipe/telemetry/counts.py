"""Values that metrics are made of: histograms with fixed bounds; it decides nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Histogram:
    """Observations counted by upper bounds, the last of which is infinity.

    Example: ``Histogram((1.0, 2.0)).add(1.5)``
    """

    bounds: Sequence[float]
    """Ascending, each the largest value that its bucket takes."""
    counts: list[int] = field(default_factory=list)
    """Per bucket, not added up; the last one is of what is above every bound."""
    total: float = 0.0
    """Sum of all observations."""

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        """Observe a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def observations(self) -> int:
        """How many there were."""
        return sum(self.counts)

    def cumulative(self) -> Iterator[tuple[float, int]]:
        """(bound, observations up to it), ascending; the last bound is infinity."""
        below = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            yield bound, below
