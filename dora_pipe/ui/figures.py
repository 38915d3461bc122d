"""Small sums that several pages need; it decides how a long run becomes a short series."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, TypeVar

T = TypeVar("T")

POINTS_MAX: Final = 400
"""Points of a series on a chart; neighbours are taken together beyond."""


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share lies, by nearest rank; None of nothing.

    Example: ``quantile([1, 2, 3, 4], .5) == 2``
    """
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def buckets(values: Sequence[T], most: int = POINTS_MAX) -> list[Sequence[T]]:
    """Neighbours in at most so many pieces of nearly one length; nothing is left out.

    Example: ``buckets([1, 2, 3], 2) == [[1], [2, 3]]``
    """
    count = min(most, len(values))
    edges = [place * len(values) // count for place in range(count + 1)] if count else [0]
    return [values[low:high] for low, high in pairwise(edges)]


def spaced(values: Sequence[T], most: int) -> list[T]:
    """At most so many of these, evenly spaced, the first and the last among them.

    Example: ``spaced([1, 2, 3, 4, 5], 3) == [1, 3, 5]``
    """
    if len(values) <= most:
        return list(values)
    if most == 1:
        return [values[-1]]
    last = len(values) - 1
    return [values[place * last // (most - 1)] for place in range(most)]


def short(value: float | None, digits: int = 4) -> float | None:
    """A number with so many digits that count, for JSON; None stays None."""
    return None if value is None else float(f"{value:.{digits}g}")


def seconds(at_ns: int, first_ns: int) -> float | None:
    """A moment in seconds of the run, to the millisecond; None for one that never was."""
    return round((at_ns - first_ns) / 1e9, 3) if at_ns else None
