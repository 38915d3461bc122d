"""What befalls the roles of a world: clocks, the bus, deaths and restarts; fair by default.

`FaultModel` is asked by the world; what strikes at a time of its own (a kill, a pause, a command)
uses `World.after`.
"""

from __future__ import annotations

from typing import Final, Protocol

from dora_pipe.bus.memory import NO_FAULTS, FaultPlan
from dora_pipe.sim.role import Role

RESTART_NS: Final = 500_000_000
"""A supervisor starts a role again after so long."""


IN_ORDER: Final = frozenset({"ended", "left", "replaced", "the world ends"})
"""Ends after which nobody starts a role again."""


class FaultModel(Protocol):
    """See the head of this file."""

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
        """No faults."""
        return NO_FAULTS

    def died(self, role: Role, why: str) -> int | None:
        """Soon, if it did not mean to."""
        return None if why in IN_ORDER else RESTART_NS
