"""Decides what a worker that hosts several versions at once takes, and what it lets go of.

Such a worker (its engine has several versions resident: adapters of one base) takes the newest
version as soon as it is there, whatever runs on it; what runs keeps its own version. `target` is
the version that it was assigned last, and it has every version that it has reported ready and was
not told to drop. An older version that nobody has any more is assigned to it like the newest.

A version is *needed* on a worker while one of its open requests carries it, or while requests of
it are queued: they may be placed there. Assigned another version, a worker drops what no open group
carries, and, if that is not enough, the oldest that are not needed. One that needs all it has room
for takes nothing new. That ends: what it needs are requests, and while nobody hosts the newest
version, or a version has no host, nothing is admitted.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from dora_pipe.schemas.identity import group_of

if TYPE_CHECKING:
    from dora_pipe.orchestrator.state import State, Worker

VERSIONS_MAX: Final = 1024
"""A worker that claims to host more versions at once is not believed."""


@dataclass(slots=True, kw_only=True)
class Residence:
    """Of one worker that hosts several versions at once."""

    most: int
    """How many; at least 2."""
    held: list[int] = field(default_factory=list)
    """Those that it has, sorted."""


def has(state: State, worker: Worker, version: int) -> bool:
    """Whether a worker can sample under a version now."""
    residence = state.residents.get(worker.name)
    if residence is None:
        return worker.target == worker.hosted == version
    return version in residence.held


def holders(state: State, version: int) -> list[Worker]:
    """The usable workers that have a version beside others, by name."""
    return [
        worker
        for name in sorted(state.residents)
        if version in state.residents[name].held and (worker := state.workers[name]).usable
    ]


def open_holders(state: State, version: int) -> list[Worker]:
    """Those of `holders` on which a request may be placed, also while they load another version."""
    return [one for one in holders(state, version) if not one.pressed and one.room > 0]


def needed(state: State, worker: Worker) -> set[int]:
    """The versions that a worker must not drop."""
    held = state.residents[worker.name].held
    running = {state.groups[group_of(one)].spec.version for one in worker.requests}
    return running | (state.queues.keys() & set(held))


def drops(state: State, worker: Worker, version: int) -> tuple[int, ...] | None:
    """What a worker lets go of when it is assigned a version; None if it has no room for it."""
    residence = state.residents[worker.name]
    used = needed(state, worker) | {version}
    found = [one for one in residence.held if one not in state.pins and one not in used]
    others = [one for one in residence.held if one not in used and one not in found]
    over = len({*residence.held, version}) - len(found) - residence.most
    if over > len(others):
        return None
    return tuple(sorted(found + others[: max(0, over)]))


def why_not(state: State, worker: Worker, version: int, drop: tuple[int, ...]) -> str:
    """Why a worker must not be assigned this version and drop those; empty if it may."""
    residence = state.residents.get(worker.name)
    if residence is None:
        return f"{worker.name} has one version and drops {drop}" if drop else ""
    rest = {*residence.held, version}.difference(drop)
    if set(drop) - set(residence.held) or version not in rest:
        return f"{worker.name} does not have what it is to drop"
    if needed(state, worker).intersection(drop):
        return f"{worker.name} has requests of what it is to drop"
    return f"{worker.name} has no room for version {version}" if len(rest) > residence.most else ""


def for_orphan(state: State, version: int) -> Worker | None:
    """The emptiest worker that has room for an older version that nobody has."""
    found = [
        worker
        for worker in (state.workers[name] for name in sorted(state.residents))
        if _may_change(worker) and drops(state, worker, version) is not None
    ]
    return min(found, key=lambda one: (one.load - one.slots, one.name), default=None)


def for_newest(state: State) -> list[Worker]:
    """The workers that take the newest version now: all that have not, if they have room."""
    found: list[Worker] = []
    if not state.residents:
        return found
    for version in sorted(state.index.hosts):
        if version == state.version:
            continue
        workers = state.index.hosts[version].workers
        for name in sorted(workers.keys() & state.residents.keys()):
            worker = workers[name]
            if _may_change(worker) and drops(state, worker, state.version) is not None:
                found.append(worker)
    return found


def _may_change(worker: Worker) -> bool:
    return worker.usable and worker.settled
