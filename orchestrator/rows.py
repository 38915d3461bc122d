"""Reward counters and sampling weights of rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import fsum
from typing import Any, Final, Self

import msgspec

RECENT_MAX: Final = 16
"""Maximum groups of a difficulty window."""


class RowStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Reward counters of a training row; `UNSEEN` before its first group.

    Groups count once all trajectories have ended and enough have a reward.

    Example: ``[row.mean * (1 - row.mean) if row.groups else 0.25 for row in rows]``
    """

    groups: int = 0
    total: float = 0.0
    """Sum of mean rewards."""
    recent: tuple[float, ...] = ()
    """Latest mean rewards, oldest first."""
    version: int = -1
    """Newest version of a group; -1 if none."""

    @property
    def mean(self) -> float:
        """Mean of recent groups; 0 if none."""
        return fsum(self.recent) / len(self.recent) if self.recent else 0.0

    def and_group(self, reward: float, version: int) -> RowStats:
        """Return the counters with one more group."""
        return RowStats(
            groups=self.groups + 1,
            total=self.total + reward,
            recent=(*self.recent, reward)[-RECENT_MAX:],
            version=max(self.version, version),
        )

    def is_solved(self, reward: float, groups: int) -> bool:
        """Report whether the last `groups` groups reached this mean reward."""
        return len(self.recent) >= groups and min(self.recent[-groups:]) >= reward

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # Immutable and numerous.


UNSEEN: Final = RowStats()


class PendingOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Uncounted outcome of a group."""

    index: int
    reward: float
    """Mean over valid trajectories."""
    version: int


class Curriculum(msgspec.Struct, kw_only=True):
    """Curriculum state of a task."""

    passed: int = 0
    """Skipped positions of the row order."""
    held: list[PendingOutcome] = []


class Weights:
    """Immutable sampling weights."""

    __slots__ = ("_sums",)

    def __init__(self, weights: list[float]) -> None:
        """Raise ValueError unless all are finite, >= 0 and not all 0."""
        self._sums = list(accumulate(weights))
        # The sum keeps NaN and infinity.
        if not self._sums or not 0 < self._sums[-1] < float("inf") or min(weights) < 0:
            raise ValueError("they are not finite numbers >= 0, or all are 0")

    def draw(self, share: float) -> int:
        """Return the row at a share of the total weight, in [0, 1)."""
        sums = self._sums
        index = bisect_right(sums, share * sums[-1])
        return min(index, bisect_left(sums, sums[-1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
