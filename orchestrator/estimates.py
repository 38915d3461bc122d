"""Estimates of request lifetime and move cost, from integer counts of the fold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LIFE_SHIFT: Final = 20
"""Unit of lifetimes: 2**20 ns, about a millisecond."""

LIVES: Final = 44
"""Lifetime classes, up to 2**42 units."""

LIVES_MAX: Final = 4096
"""Count at which all classes are halved."""

LIVES_MIN: Final = 8
"""Minimum lifetimes for an estimate; with fewer, the expected remainder equals the age."""

STALL_NS: Final = 500_000_000
"""Initial estimate of a move's cost."""

STALL_MIN_NS: Final = 50_000_000
"""Minimum: two bus round trips."""

STALL_WEIGHT: Final = 8
"""Inverse weight of the newest move."""


@dataclass(slots=True, kw_only=True)
class Estimates:
    """Lifetimes and move costs."""

    lives: list[int] = field(default_factory=lambda: [0] * LIVES)
    """Counts by bit length: class k holds 2**(k-1) to 2**k units."""
    count: int = 0
    stall_ns: int = STALL_NS
    """Running mean of a move's pause."""

    def lived(self, life_ns: int) -> None:
        """Count a request's lifetime."""
        lives = self.lives
        lives[min(LIVES - 1, (max(0, life_ns) >> LIFE_SHIFT).bit_length())] += 1
        self.count += 1
        if self.count > LIVES_MAX:
            self.lives = [life // 2 for life in lives]
            self.count = sum(self.lives)

    def released(self, after_ns: int) -> None:
        """Update the pause: resuming takes as long as releasing."""
        stall_ns = max(STALL_MIN_NS, 2 * after_ns)
        self.stall_ns += (stall_ns - self.stall_ns) // STALL_WEIGHT


class Outlook:
    """Expected remaining lifetimes."""

    def __init__(self, estimates: Estimates) -> None:
        self.stall_ns = estimates.stall_ns
        self._lives = estimates.lives
        self._left: dict[int, int] = {}

    def left_ns(self, age_ns: int) -> int:
        """Return the expected remainder at an age, rounded to eighths."""
        units = max(1, age_ns >> LIFE_SHIFT)
        shift = max(0, units.bit_length() - 4)
        age = units >> shift << shift
        expected = self._left.get(age)
        if expected is None:
            expected = self._left[age] = self._expect(age) << LIFE_SHIFT
        return expected

    def _expect(self, age: int) -> int:
        first = age.bit_length()
        low, high = 1 << first - 1, 1 << first
        count = self._lives[first] * (high - age) / (high - low) if first < LIVES else 0.0
        total = count * (high - age) / 2
        for number in range(first + 1, LIVES):
            middle = 3 << number - 1 >> 1
            count += self._lives[number]
            total += self._lives[number] * (middle - age)
        return int(total / count) if count >= LIVES_MIN else age
