"""Virtual time, and the clocks by which roles see it; decides what a wrong clock shows.

The world's clock is what really happens. A role's own clock may run slow or fast, and its wall
clock may be off and jump either way: nothing may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

WALL_NS: Final = 1_800_000_000 * 10**9
"""The wall clock at the beginning of every world."""

NEVER_NS: Final = 1 << 62
"""Later than any event."""


@dataclass(slots=True)
class WorldClock:
    """What time it really is, ns since the world began; the world alone moves it."""

    ns: int = 0

    def now_ns(self) -> int:
        """Virtual time."""
        return self.ns

    def wall_ns(self) -> int:
        """The right wall clock."""
        return WALL_NS + self.ns

    def sleep(self, seconds: float) -> None:
        """Nobody sleeps on the world's clock. Raises AssertionError."""
        raise AssertionError("only a role sleeps")


@dataclass(slots=True)
class RoleClock:
    """One incarnation's clocks: ``RoleClock(world.clock, pause, rate=0.5)`` counts half as fast.

    `pause` lets the rest of the world go on until then (world time, ns).
    """

    world: WorldClock
    pause: Callable[[int], None]
    rate: float = 1.0
    wall_off_ns: int = 0
    """The wall clock is ahead by so much; it may be changed at any time."""
    start_ns: int = 0

    def now_ns(self) -> int:
        """Monotonic time as this role counts it."""
        if self.rate == 1.0:
            return self.world.ns
        return self.start_ns + int((self.world.ns - self.start_ns) * self.rate)

    def wall_ns(self) -> int:
        """The wall clock as this role has it."""
        return WALL_NS + self.world.ns + self.wall_off_ns

    def sleep(self, seconds: float) -> None:
        """The others go on meanwhile."""
        self.pause(self.world.ns + max(1, int(seconds * 1e9 / self.rate)))

    def world_ns(self, own_ns: int) -> int:
        """When it really is `own_ns` on this clock, or shortly after."""
        if self.rate == 1.0 or own_ns >= NEVER_NS:
            return own_ns
        return self.start_ns + math.ceil((own_ns - self.start_ns) / self.rate)
