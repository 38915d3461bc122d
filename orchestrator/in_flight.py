"""Automatic number of batches in flight (C).

Over `STEPS_EACH` steps,

- fewer than B - B / 16 finished groups per commit, and more than `EMPTY_MIN` of the slots empty
  because of C alone: C grows by `CHANGE`.
- more than B + B / 4 finished groups: C shrinks by `CHANGE`.

The gap exceeds the effect of one change, so C does not oscillate. C stays between `START` and the
bound. Below 2 no whole batch could be ready: the batch in training counts as one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

START: Final = 2.0
"""Initial and minimum C, in batches."""

CHANGE: Final = 0.25
"""Batches per change of C."""

STEPS_EACH: Final = 3
"""Steps per decision."""

EMPTY_MIN: Final = 0.05

UNIT_NS: Final = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """C and counts since its last change."""

    batches: float = START
    """C."""
    steps: int = 0
    ready: int = 0
    """Sum over commits."""
    ready_now: int = -1
    """Finished groups at the last commit; -1 after a batch."""
    empty_ms: int = 0
    """Slot time lost to C."""
    slots_ms: int = 0
    empty: int = 0
    """Slots empty because of C."""
    slots: int = 0
    since_ns: int = 0

    def at_round(self, now_ns: int, *, empty: int, slots: int) -> InFlight:
        """Count a round."""
        lasted_ms = (now_ns - self.since_ns) // UNIT_NS if self.slots else 0
        return dataclasses.replace(
            self,
            empty_ms=self.empty_ms + self.empty * lasted_ms,
            slots_ms=self.slots_ms + self.slots * lasted_ms,
            empty=empty,
            slots=slots,
            since_ns=now_ns,
        )

    def at_commit(self, ready: int) -> InFlight:
        """Count a commit."""
        return dataclasses.replace(self, ready_now=ready)

    def at_batch(self, *, per_step: int, most: float) -> InFlight:
        """Decide C when the next batch is taken; at most `most`."""
        if self.ready_now < 0:  # First batch, or replacement of a refused one.
            return self
        steps, ready = self.steps + 1, self.ready + self.ready_now
        if steps < STEPS_EACH:
            return dataclasses.replace(self, steps=steps, ready=ready, ready_now=-1)
        return dataclasses.replace(
            self,
            batches=self._decided(16 * ready, 16 * steps * per_step, most),
            steps=0,
            ready=0,
            ready_now=-1,
            empty_ms=0,
            slots_ms=0,
        )

    def _decided(self, ready: int, target: int, most: float) -> float:
        """Return the new C; arguments are in sixteenths of groups."""
        starved = self.empty_ms > EMPTY_MIN * self.slots_ms
        change = 0.0
        if ready < target - target // 16 and starved:
            change = CHANGE
        elif ready > target + target // 4:
            change = -CHANGE
        return max(START, min(self.batches + change, most))
