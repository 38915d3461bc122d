"""Count slots that only the limit of batches in flight leaves empty.

A slot is in use from the placement of a request until the record of its end is folded.
"""

from __future__ import annotations

import dataclasses

from dora_pipe.orchestrator import elastic
from dora_pipe.orchestrator.staleness import admissible
from dora_pipe.orchestrator.state import State


def capped(state: State) -> tuple[int, int]:
    """Return (slots that are empty because of the limit alone, slots of all usable workers).

    Both come from the index: the cost is that of the idle workers.
    """
    index, newest = state.index, state.version
    slots = sum(hosts.slots for hosts in index.hosts.values())
    held = elastic.held(state)
    idle = sum(
        one.slots for one in index.idle.values() if one.target != newest and one.name not in held
    )
    empty = index.free(newest) + idle
    return (empty if empty and _only_the_limit(state) else 0), slots


def _only_the_limit(state: State) -> bool:
    """Whether a group would be admitted if more batches might be in flight."""
    if state.config is None or state.paused or state.failures.halted:
        return False
    at = state.standing()
    if admissible(state.deadlines, at):
        return False
    # The bound has no room beyond max_staleness + 1 batches: this leaves the limit out.
    unlimited = dataclasses.replace(at, in_flight_batches=at.max_staleness + 1.0)
    return bool(admissible(state.deadlines, unlimited))
