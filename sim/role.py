"""Incarnations with their clocks, faults and observers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, Protocol

from dora_pipe.bus.memory import NO_FAULTS, FaultPlan, MemoryBus
from dora_pipe.core.loop.runtime import Meter, Port, Runtime
from dora_pipe.core.pure.machine import Machine
from dora_pipe.core.pure.records import Record

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"
WALL_NS: Final = 1_800_000_000 * 10**9

NEVER_NS: Final = 1 << 62
"""Later than any event."""

RESTART_NS: Final = 500_000_000


IN_ORDER: Final = frozenset({"ended", "left", "replaced", "the world ends"})


@dataclass(slots=True)
class WorldClock:
    """True time in ns, advanced by the world."""

    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return WALL_NS + self.ns

    def sleep(self, seconds: float) -> None:
        raise AssertionError("only a role sleeps")


@dataclass(slots=True)
class RoleClock:
    """Skewed clock: ``RoleClock(world.clock, pause, rate=0.5)`` runs half as fast.

    `pause` runs the rest of the world until a time.
    """

    world: WorldClock
    pause: Callable[[int], None]
    rate: float = 1.0
    wall_off_ns: int = 0
    """Wall clock offset; may change."""
    start_ns: int = 0

    def now_ns(self) -> int:
        if self.rate == 1.0:
            return self.world.ns
        return self.start_ns + int((self.world.ns - self.start_ns) * self.rate)

    def wall_ns(self) -> int:
        return WALL_NS + self.world.ns + self.wall_off_ns

    def sleep(self, seconds: float) -> None:
        self.pause(self.world.ns + max(1, int(seconds * 1e9 / self.rate)))

    def world_ns(self, own_ns: int) -> int:
        """Return when this clock reaches `own_ns`, or shortly after."""
        if self.rate == 1.0 or own_ns >= NEVER_NS:
            return own_ns
        return self.start_ns + math.ceil((own_ns - self.start_ns) / self.rate)


class SimPort(Port[Any, Any], Protocol):
    """Port that knows the time of its next event."""

    def due_ns(self) -> int:
        """Return the next event in the role's ns; `NEVER_NS` if none."""
        ...


class Killed(BaseException):
    """Unwinds a killed role's turn; never catch it."""


@dataclass(eq=False, slots=True)
class Role:
    """Incarnation of a role."""

    name: str
    number: int
    clock: RoleClock
    chance: Random
    meter: Meter
    bus: MemoryBus = field(init=False)
    machine: Machine[Any, Any] = field(init=False)
    runtime: Runtime[Any, Any] | None = None
    ports: Sequence[SimPort] = ()
    reads: frozenset[str] = frozenset()
    incarnation: int = -1
    """Offset of a worker's `worker joined`."""
    paused_until_ns: int = 0
    due_ns: int = NEVER_NS
    pending_ns: list[int] = field(default_factory=list)
    """Times at which records it reads become visible."""
    acting: bool = False
    asleep: bool = False
    """Whether its turn waits for the bus."""
    dead: bool = False
    end: str = ""

    @property
    def exclusive(self) -> bool:
        return self.name in (ORCHESTRATOR, TRAINER)


class Observer(Protocol):
    """Observer; exceptions end the world."""

    def appended(self, records: Sequence[Record], role: Role | None) -> None: ...

    def wrap(self, role: Role, machine: Machine[Any, Any]) -> Machine[Any, Any]: ...


class FaultModel:
    """Source of faults; a subclass adds some. Use `World.after` for timed faults such as a kill,
    pause or command."""

    def born(self, role: Role) -> FaultPlan:
        return NO_FAULTS

    def died(self, role: Role, why: str) -> int | None:
        """Return the restart delay in ns; None for never.

        `why` is the machine's outcome (`ended`, `left`, `fenced`, `replaced`, `failed`), `killed`,
        or the error.
        """
        return None if why in IN_ORDER else RESTART_NS
