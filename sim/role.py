"""One incarnation of a role in a world: the clocks by which it sees time, what befalls it, and who
may look on; decides what a wrong clock shows.

The world's clock is what really happens. A role's own clock may run slow or fast, and its wall
clock may be off and jump either way: nothing may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from dora_pipe.bus.memory import NO_FAULTS, FaultPlan, MemoryBus
from dora_pipe.bus.port import Record
from dora_pipe.core.runtime import Machine, Meter, Port, Runtime

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"

WALL_NS: Final = 1_800_000_000 * 10**9
"""The wall clock at the beginning of every world."""

NEVER_NS: Final = 1 << 62
"""Later than any event."""

RESTART_NS: Final = 500_000_000
"""A supervisor starts a role again after so long."""


IN_ORDER: Final = frozenset({"ended", "left", "replaced", "the world ends"})
"""Ends after which nobody starts a role again."""


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
        return WALL_NS + self.world.ns + self.wall_off_ns

    def sleep(self, seconds: float) -> None:
        """The others go on meanwhile."""
        self.pause(self.world.ns + max(1, int(seconds * 1e9 / self.rate)))

    def world_ns(self, own_ns: int) -> int:
        """When it really is `own_ns` on this clock, or shortly after."""
        if self.rate == 1.0 or own_ns >= NEVER_NS:
            return own_ns
        return self.start_ns + math.ceil((own_ns - self.start_ns) / self.rate)


class SimPort(Port, Protocol):
    """A port that knows when it has something to say."""

    def due_ns(self) -> int:
        """Monotonic ns (the role's clock) of its next event; `NEVER_NS` while it waits for none."""
        ...


class Killed(BaseException):
    """Unwinds the turn of a role that was killed in the middle of it; no code may catch it."""


@dataclass(eq=False, slots=True)
class Role:
    """One incarnation of a role."""

    name: str
    number: int
    """Counts all incarnations of a world."""
    clock: RoleClock
    chance: Random
    meter: Meter
    bus: MemoryBus = field(init=False)
    machine: Machine = field(init=False)
    runtime: Runtime | None = None
    ports: Sequence[SimPort] = ()
    reads: frozenset[str] = frozenset()
    epoch: int = -1
    """Of a worker: the offset of its `worker joined`."""
    paused_until_ns: int = 0
    due_ns: int = NEVER_NS
    pending_ns: list[int] = field(default_factory=list)
    """When records that it reads become visible."""
    acting: bool = False
    """In the middle of a turn."""
    asleep: bool = False
    """In the middle of a turn, which waits for the bus."""
    dead: bool = False
    end: str = ""
    """How it ended."""

    @property
    def exclusive(self) -> bool:
        return self.name in (ORCHESTRATOR, TRAINER)


class Observer(Protocol):
    """Sees what happens in a world; whatever it raises ends the world."""

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        """Records landed in the log, in the turn of this role (None: in nobody's)."""
        ...

    def wrap(self, role: Role, machine: Machine) -> Machine:
        """The machine that the loop drives: this one, or one that passes everything on to it."""
        ...


class FaultModel(Protocol):
    """Asked by the world; what strikes at a time of its own (a kill, a pause, a command) uses
    `World.after`.
    """

    def born(self, role: Role) -> FaultPlan:
        """An incarnation begins: what befalls its bus; its clock may be set wrong."""
        ...

    def died(self, role: Role, why: str) -> int | None:
        """It ended: when to start it again (ns from now), None: never.

        `why` is the outcome of its machine (`ended`, `left`, `fenced`, `replaced`, `failed`),
        `killed`, or the error that ended it.
        """
        ...


class NoFaults:
    """Nothing goes wrong; what dies all the same is started again, what ends in order is not."""

    def born(self, role: Role) -> FaultPlan:
        return NO_FAULTS

    def died(self, role: Role, why: str) -> int | None:
        """Soon, if it did not mean to."""
        return None if why in IN_ORDER else RESTART_NS
