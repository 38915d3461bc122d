"""What befalls the roles of a world: clocks, the bus, deaths and restarts; fair by default.

`Weather` is asked by the world; what strikes at a time of its own (a kill, a pause, a command) uses
`World.after`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from dora_pipe.bus.memory import NO_FAULTS, FaultPlan

if TYPE_CHECKING:
    from dora_pipe.sim.world import Role

RESTART_NS: Final = 500_000_000
"""A supervisor starts a role again after so long."""


class Weather(Protocol):
    """See the head of this file."""

    def born(self, role: Role) -> FaultPlan:
        """An incarnation begins: what befalls its bus; its clock may be set wrong."""
        ...

    def died(self, role: Role, why: str) -> int | None:
        """It ended otherwise than in order: when to start it again (ns from now), None: never."""
        ...


class FairWeather:
    """Nothing goes wrong; what dies all the same is started again."""

    def born(self, role: Role) -> FaultPlan:
        """No faults."""
        return NO_FAULTS

    def died(self, role: Role, why: str) -> int | None:
        """Soon."""
        return RESTART_NS
