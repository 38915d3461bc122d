"""A quantity over the time of a run in a bounded number of slices; it decides how wide they are."""

from __future__ import annotations

from typing import Final

SLICES_MAX: Final = 256
FIRST_NS: Final = 50_000_000
"""Width of a slice at the beginning; it doubles whenever there would be too many."""


class Course:
    """Sums of a quantity by slice. Example: ``Course(start_ns).add(from_ns, until_ns, 3.0)``."""

    def __init__(self, start_ns: int) -> None:
        self.start_ns = start_ns
        self.width_ns = FIRST_NS
        self.sums: list[float] = []

    def add(self, from_ns: int, until_ns: int, rate: float) -> None:
        """A quantity that had this value from one moment to another: value times seconds."""
        from_ns = max(from_ns, self.start_ns)
        if until_ns <= from_ns:
            return
        self._reach(until_ns)
        first = self._place(from_ns)
        last = min(self._place(until_ns), len(self.sums) - 1)
        for place in range(first, last + 1):
            low = self.start_ns + place * self.width_ns
            inside = min(until_ns, low + self.width_ns) - max(from_ns, low)
            self.sums[place] += rate * inside / 1e9

    def count(self, at_ns: int, amount: float) -> None:
        """So much at one moment."""
        at_ns = max(at_ns, self.start_ns)
        self._reach(at_ns + 1)
        self.sums[self._place(at_ns)] += amount

    def widened(self, width_ns: int) -> list[float]:
        """The sums by slices of this width, which must be this one's times a power of two."""
        every = max(1, width_ns // self.width_ns)
        return [sum(self.sums[at : at + every]) for at in range(0, len(self.sums), every)]

    def _place(self, at_ns: int) -> int:
        return (at_ns - self.start_ns) // self.width_ns

    def _reach(self, until_ns: int) -> None:
        while self._place(until_ns - 1) >= SLICES_MAX:
            self.width_ns *= 2
            pairs = range(0, len(self.sums), 2)
            self.sums = [sum(self.sums[at : at + 2]) for at in pairs]
        missing = self._place(until_ns - 1) + 1 - len(self.sums)
        if missing > 0:
            self.sums += [0.0] * missing


class Filling:
    """How many requests a worker has, and which share of its slots that fills, over time."""

    def __init__(self, start_ns: int, slots: int, joined_ns: int) -> None:
        self.course = Course(start_ns)
        """Seconds of full slots."""
        self.there = Course(start_ns)
        """Seconds that it was there."""
        self.requests = 0
        self._slots = max(1, slots)
        self._last_ns = joined_ns

    def change(self, at_ns: int, more: int) -> None:
        """From this moment on it has so many more requests; clocks that go back move nothing."""
        self.until(at_ns)
        self.requests = max(0, self.requests + more)

    def until(self, at_ns: int) -> None:
        """It went on like this until now."""
        share = min(1.0, self.requests / self._slots)
        self.course.add(self._last_ns, at_ns, share)
        self.there.add(self._last_ns, at_ns, 1.0)
        self._last_ns = max(self._last_ns, at_ns)
