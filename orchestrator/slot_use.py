"""Says what every slot of every worker is used for, or why it is empty; it decides nothing.

It knows what the orchestrator knows: a slot is in use from the placement of a request until the
record that it has ended is folded.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final, Literal

from dora_pipe.orchestrator import elastic
from dora_pipe.orchestrator.staleness import admissible
from dora_pipe.orchestrator.state import State, Worker

Use = Literal[
    "busy",
    "in-flight",
    "bound",
    "steps",
    "older",
    "elastic",
    "loading",
    "kv",
    "leaving",
    "placing",
    "pause",
]
"""Of a slot; docs/why.md says what each is."""

UNLIMITED: Final = 2**40
"""More steps than a run has."""


def slot_use(state: State) -> Counter[Use]:
    """Slots of all workers by what they are used for, or by why they are empty."""
    found: Counter[Use] = Counter()
    for worker in state.workers.values():
        busy = min(worker.load, worker.slots)
        found["busy"] += busy
        if busy < worker.slots:
            found[_why_empty(state, worker)] += worker.slots - busy
    return found


def capped(state: State) -> tuple[int, int]:
    """(slots that are empty because of C alone, slots of all usable workers), by the index: the
    cost is that of the idle workers."""
    index, newest = state.index, state.version
    slots = sum(hosts.slots for hosts in index.hosts.values())
    held = elastic.held(state)
    idle = sum(
        one.slots for one in index.idle.values() if one.target != newest and one.name not in held
    )
    empty = index.free(newest) + idle
    return (empty if empty and why_nothing_new(state) == "in-flight" else 0), slots


def why_nothing_new(state: State) -> Use:
    """Why no group is admitted to a free slot of the newest version."""
    if state.config is None or state.paused or state.failures.halted:
        return "pause"
    at = state.standing()
    if admissible(state.deadlines, at):
        return "placing"
    # The bound has no room beyond eta + 1 batches, so this leaves the cap out.
    uncapped = dataclasses.replace(at, in_flight_batches=at.max_staleness + 1.0)
    if admissible(state.deadlines, uncapped):
        return "in-flight"
    endless = dataclasses.replace(uncapped, steps=UNLIMITED)
    return "steps" if admissible(state.deadlines, endless) else "bound"


def _why_empty(state: State, worker: Worker) -> Use:
    if not worker.usable:
        return "leaving"
    if worker.name in elastic.held(state):
        return "elastic"
    if worker.loading:
        return "loading"
    if worker.pressed:
        return "kv"
    if worker.requests and worker.target < state.version:
        return "older"
    return why_nothing_new(state)
