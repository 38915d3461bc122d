"""Decides how many batches are in flight where that is automatic, from what the fold has counted.

The trainer needs a whole batch that has finished when it becomes free, and nothing more: what
finishes earlier only gets older. So C follows what stands ready at a commit. Of every `STEPS_EACH`
steps the means are taken:

- fewer than B - B / 16 groups stood ready, and more than `EMPTY_MIN` of the slots were empty
  because of C alone: C grows by `CHANGE`. Where slots were full, or empty for another reason, a
  larger C would win nothing.
- more than B + B / 4 groups stood ready: C shrinks by `CHANGE`.

Between the two lies more than what a change moves, so C does not swing. It changes when a
batch is taken, which says so, and stays between `START` and what the bound has room for. With C
below 2 no whole batch could stand ready, since the one in training counts as one.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

START: Final = 2.0
"""C in batches, before anything is known, and at least."""

CHANGE: Final = 0.25
"""Batches by which C changes at once."""

STEPS_EACH: Final = 3
"""Steps whose means decide."""

EMPTY_MIN: Final = 0.05
"""Share of the slots."""

UNIT_NS: Final = 1_000_000
"""Slot times are counted in ms: whole numbers, of any run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InFlight:
    """C, and what was counted since it was last decided. Part of the state."""

    batches: float = START
    """C, as far as `max_staleness` allows it."""
    steps: int = 0
    """Counted since the last decision."""
    ready: int = 0
    """Finished groups at their commits, added up."""
    ready_now: int = -1
    """Those at the commit after which no batch was taken yet; -1: there is none."""
    empty_ms: int = 0
    """Slot time that was lost to C."""
    slots_ms: int = 0
    """Of all slots."""
    empty: int = 0
    """Slots that are empty because of C, since the last round."""
    slots: int = 0
    """All of them."""
    since_ns: int = 0
    """Time of that round."""

    def at_round(self, now_ns: int, *, empty: int, slots: int) -> InFlight:
        """A round is over, after which so many slots are empty because of C."""
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
        """The trainer is free, and so many groups have finished."""
        return dataclasses.replace(self, ready_now=ready)

    def at_batch(self, *, per_step: int, most: float) -> InFlight:
        """The next batch is taken; C is at most `most`."""
        if self.ready_now < 0:  # The first one, or in place of one that was refused.
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

    def _decided(self, ready: int, wanted: int, most: float) -> float:
        """Sixteenths of groups that stood ready, and that the trainer needed."""
        starved = self.empty_ms > EMPTY_MIN * self.slots_ms
        change = 0.0
        if ready < wanted - wanted // 16 and starved:
            change = CHANGE
        elif ready > wanted + wanted // 4:
            change = -CHANGE
        return max(START, min(self.batches + change, most))
