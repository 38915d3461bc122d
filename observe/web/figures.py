"""Small sums that several pages need; it decides what of a long series is looked at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def quantile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which this share lies, by nearest rank; None of nothing.

    Example: ``quantile([1, 2, 3, 4], .5) == 2``
    """
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


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


def seconds(at_ns: int | None, first_ns: int) -> float | None:
    """A moment in seconds of the run, to the millisecond; None for one that never was."""
    return round((at_ns - first_ns) / 1e9, 3) if at_ns else None
