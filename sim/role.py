"""One incarnation of a role in a world, and who may look on; decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, Protocol

from dora_pipe.bus.memory import MemoryBus
from dora_pipe.bus.port import Record
from dora_pipe.core.runtime import Machine, Meter, Runtime
from dora_pipe.sim.clock import NEVER_NS, RoleClock
from dora_pipe.sim.ports import SimPort

ORCHESTRATOR: Final = "orchestrator"
TRAINER: Final = "trainer"


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
    on_close: list[Callable[[], None]] = field(default_factory=list)

    @property
    def exclusive(self) -> bool:
        """Whether a run has one of it."""
        return self.name in (ORCHESTRATOR, TRAINER)


class Watcher(Protocol):
    """Sees what happens in a world; whatever it raises ends the world."""

    def appended(self, records: Sequence[Record], role: Role | None) -> None:
        """Records landed in the log, in the turn of this role (None: in nobody's)."""
        ...

    def overhear(self, role: Role, machine: Machine) -> Machine:
        """The machine that the loop drives: this one, or one that passes everything on to it."""
        ...
