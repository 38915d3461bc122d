"""Decides what the planner expects of time: how long a request still runs, what a move costs it.

Nothing is configured: both come from what this run has seen, counted by the fold, so that equal
logs give equal expectations. Counts are whole numbers; only what is asked of them is a float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

LIFE_SHIFT: Final = 20
"""Lives are counted in units of 2**20 ns, about a millisecond."""

LIVES: Final = 44
"""Classes of lives; the last begins at 2**42 units, longer than any run."""

LIVES_MAX: Final = 4096
"""So many lives counted, and every class is halved: what was long ago counts less and less."""

LIVES_MIN: Final = 8
"""With fewer lives that reached an age, what is expected beyond it is that age once more."""

STALL_NS: Final = 500_000_000
"""What a move is expected to cost before the first one was seen."""

STALL_MIN_NS: Final = 50_000_000
"""A move costs a request at least so much: two turns of the bus."""

STALL_WEIGHT: Final = 8
"""One move in so many: the weight of the newest in the running mean."""


@dataclass(slots=True, kw_only=True)
class Estimates:
    """What was seen so far. Part of the state."""

    lives: list[int] = field(default_factory=lambda: [0] * LIVES)
    """Logged requests by the bit length of their life in units: class k holds 2**(k-1) to 2**k."""
    count: int = 0
    """Sum of `lives`."""
    stall_ns: int = STALL_NS
    """Running mean of the time a request stands still when it moves."""

    def lived(self, life_ns: int) -> None:
        """A request was logged so long after it was placed for the first time."""
        lives = self.lives
        lives[min(LIVES - 1, (max(0, life_ns) >> LIFE_SHIFT).bit_length())] += 1
        self.count += 1
        if self.count > LIVES_MAX:
            self.lives = [one // 2 for one in lives]
            self.count = sum(self.lives)

    def released(self, after_ns: int) -> None:
        """A worker let go of a request so long after it was asked; going on takes as long again."""
        stall_ns = max(STALL_MIN_NS, 2 * after_ns)
        self.stall_ns += (stall_ns - self.stall_ns) // STALL_WEIGHT


class Outlook:
    """What is expected of requests by their age, worked out once per class of ages.

    Example: ``Outlook(estimates).left_ns(age_ns)``: mean of what is left of those who got so far.
    """

    def __init__(self, seen: Estimates) -> None:
        self.stall_ns = seen.stall_ns
        self._lives = seen.lives
        self._left: dict[int, int] = {}

    def left_ns(self, age_ns: int) -> int:
        """Expected further life of a request that has lived so long; classes of an eighth."""
        units = max(1, age_ns >> LIFE_SHIFT)
        shift = max(0, units.bit_length() - 4)
        age = units >> shift << shift
        found = self._left.get(age)
        if found is None:
            found = self._left[age] = self._expect(age) << LIFE_SHIFT
        return found

    def _expect(self, age: int) -> int:
        """Every class is taken as even between its bounds; the part below `age` does not count."""
        first = age.bit_length()
        low, high = 1 << first - 1, 1 << first
        count = self._lives[first] * (high - age) / (high - low) if first < LIVES else 0.0
        total = count * (high - age) / 2
        for number in range(first + 1, LIVES):
            middle = 3 << number - 1 >> 1
            count += self._lives[number]
            total += self._lives[number] * (middle - age)
        return int(total / count) if count >= LIVES_MIN else age
