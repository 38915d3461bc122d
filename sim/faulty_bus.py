"""A bus that is as bad as a seed says; decides what befalls which append and which poll."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from dora_pipe.bus.memory import AppendFault
from dora_pipe.bus.port import Append
from dora_pipe.sim.role import Role

if TYPE_CHECKING:
    from dora_pipe.sim.fault_injector import FaultInjector

ALL: Final = 1 << 30
"""Every record of an append lands."""


class FaultyBus:
    """What befalls the appends and polls of one incarnation."""

    def __init__(self, injector: FaultInjector, role: Role) -> None:
        self._storm = injector
        self._role = role
        self.outage_ns = 0
        """It does not reach the bus before then."""
        self.candidates = False
        """It dies in its next append."""

    def on_append(self, call: int, records: Sequence[Append]) -> AppendFault | None:
        """See `FaultPlan`."""
        injector = self._storm
        if injector.over:
            return None
        if self._is_away():
            return AppendFault(kind="failed")
        if self.candidates:
            injector.world.kill(self._role, "killed while appending")
            return AppendFault(kind="unknown", lands=injector.chance.randint(0, len(records)))
        if injector.chance.random() >= injector.draw.append_share:
            return None
        return self._befall(len(records))

    def on_poll(self, call: int) -> bool:
        """See `FaultPlan`."""
        injector = self._storm
        if injector.over:
            return False
        refused = "poll-refused" in injector.draw.faults
        if refused and injector.chance.random() < injector.draw.append_share:
            injector.struck["poll-refused"] += 1
            return True
        return self._is_away()

    def _is_away(self) -> bool:
        return self._storm.world.clock.ns < max(self.outage_ns, self._storm.outage_ns)

    def _befall(self, records: int) -> AppendFault | None:
        injector = self._storm
        kinds = [kind for kind in _APPENDS if kind in injector.draw.faults]
        if self._role.exclusive:  # What an exclusive writer appends is visible when it is told so.
            kinds = [kind for kind in kinds if kind != "delayed"]
        if not kinds:
            return None
        kind = injector.chance.choice(kinds)
        injector.struck[kind] += 1
        if kind == "append-refused":
            return AppendFault(kind=injector.chance.choice(("failed", "full")))
        if kind == "append-unknown":
            return AppendFault(kind="unknown", lands=ALL)
        if kind == "append-torn":
            return AppendFault(kind="unknown", lands=injector.chance.randrange(records))
        return AppendFault(kind="delayed", delay_ms=injector.chance.randint(1, 400))


_APPENDS: Final = ("append-refused", "append-unknown", "append-torn", "delayed")
