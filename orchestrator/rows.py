"""What is known of the rows of a task that has a curriculum, and what is drawn with."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate
from math import fsum
from typing import Any, Final, Self

import msgspec

RECENT_MAX: Final = 16
"""Mean rewards that are kept of a row: as many as a difficulty window may ask for."""


class RowStats(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The reward counters of one row of the training data; those of a row that no group has ended
    of are `UNSEEN`.

    A group counts once all its siblings have ended and enough of them have a reward; what fails or
    is cancelled before does not.

    Example: ``[row.mean * (1 - row.mean) if row.groups else 0.25 for row in rows]``
    """

    groups: int = 0
    """That have ended."""
    total: float = 0.0
    """Sum of their mean rewards."""
    recent: tuple[float, ...] = ()
    """Mean rewards of the last 16 of them, the newest last."""
    version: int = -1
    """The newest version that one of them was dispatched under; -1: of none."""

    @property
    def mean(self) -> float:
        """Mean reward of the recent groups; 0 where there are none."""
        return fsum(self.recent) / len(self.recent) if self.recent else 0.0

    def and_group(self, reward: float, version: int) -> RowStats:
        """With one more group, of this mean reward."""
        return RowStats(
            groups=self.groups + 1,
            total=self.total + reward,
            recent=(*self.recent, reward)[-RECENT_MAX:],
            version=max(self.version, version),
        )

    def is_solved(self, reward: float, groups: int) -> bool:
        """Whether each of the last so many groups had at least this mean reward."""
        return len(self.recent) >= groups and min(self.recent[-groups:]) >= reward

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # It never changes, and there are many.


UNSEEN: Final = RowStats()


class PendingOutcome(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The outcome of a group that is not in the counters yet."""

    index: int
    reward: float
    """Mean of its valid siblings."""
    version: int


class Curriculum(msgspec.Struct, kw_only=True):
    """Of one task that has a sampler or a window: what is not said row by row."""

    passed: int = 0
    """Places of the order whose rows were skipped."""
    held: list[PendingOutcome] = []
    """In the order in which the groups ended; bounded."""


class Weights:
    """What rows are drawn by; follows from the counters and the version, and never changes."""

    __slots__ = ("_sums",)

    def __init__(self, weights: list[float]) -> None:
        """Finite, none below 0, not all 0: else ValueError, which says what is wrong."""
        self._sums = list(accumulate(weights))
        # In a sum every NaN and every infinity is still there.
        if not self._sums or not 0 < self._sums[-1] < float("inf") or min(weights) < 0:
            raise ValueError("they are not finite numbers >= 0, or all are 0")

    def draw(self, share: float) -> int:
        """The row at this share, in [0, 1), of all weights; never one whose weight is 0."""
        sums = self._sums
        found = bisect_right(sums, share * sums[-1])
        return min(found, bisect_left(sums, sums[-1]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
