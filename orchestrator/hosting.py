"""Decides which worker hosts which version, and where queued requests may go.

Theory of operation. Everything is planned on targets: a worker counts for the version it was
assigned, whether or not it has loaded it, and a request for the worker it moves to. A worker keeps
its version until it is *idle*: no open request, nobody who arrives, nothing loading. Of an older
version only as many workers are *kept* as its open requests need slots, the fullest first; the
others get nothing new: they run empty, or are emptied (`moving`), and are free.

A version with queued requests and no worker is an *orphan*. Orphans come before new work: while
there is one, nothing is admitted, and for every orphan one worker of a newer version, the newest
and emptiest first, is a *victim*: it gets nothing new, so that it runs empty and can be assigned.
This ends: admission stands still, so open requests only become fewer, and a version is only ever
disturbed for an older one. It also works with a single worker.

Some workers host several versions at once (`State.residents`: their engines have adapters of one
base). Such a worker takes the newest version as soon as it is there, whatever runs on it; what runs
keeps its own version. `target` is the version that it was assigned last, and it has every version
that it has reported ready and was not told to drop. An older version that nobody has any more is
assigned to it like the newest. A version is *needed* on it while one of its open requests carries
it, or while requests of it are queued: they may be placed there. Assigned another version, it drops
what no open group carries, and, if that is not enough, the oldest that are not needed. One that
needs all it has room for takes nothing new. That ends: what it needs are requests, and while nobody
hosts the newest version, or a version has no host, nothing is admitted.

Warning: a plan must leave nothing to plan (`plan(apply(plan)) == ()`). The orders below are chosen
so that placing requests does not change them: what is fullest only gets fuller, what is emptiest
and spared stays emptiest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.schemas.identity import group_of

Assignment = tuple[Worker, int, str]
"""(worker, version, reason)."""


def orphans(state: State) -> list[int]:
    """Versions with queued requests and no worker, oldest first."""
    found = state.index.orphans(state.queues)
    if found and state.residents:
        return [version for version in found if not holders(state, version)]
    return found


def by_fullness(state: State, version: int) -> list[Worker]:
    """The workers of a version, fullest first, those that could be assigned another one last."""
    idle = state.index.idle
    workers = state.index.hosts[version].workers.values()
    return sorted(workers, key=lambda one: (-one.load, one.name in idle, one.name))


def kept(state: State, version: int) -> list[Worker]:
    """The workers of an older version that its open requests need, fullest first."""
    if version not in state.index.hosts:
        return []
    need = state.index.hosts[version].load + len(state.queues.get(version, ()))
    found: list[Worker] = []
    for worker in by_fullness(state, version):
        if need <= 0:
            break
        need -= worker.slots
        found.append(worker)
    return found


def orphan_assignment(state: State, held: frozenset[str] = frozenset()) -> Assignment | None:
    """A worker for the oldest version with queued requests and no host, if there is one: one that
    hosts several versions and has room for it, else an idle one that is not `held`."""
    waiting = orphans(state)
    if not waiting or not (state.index.idle or state.residents):
        return None
    needed = _needed(state)
    for version in waiting:
        shared = resident_for_orphan(state, version)
        if shared is not None:
            count = len(state.queues[version])
            return shared, version, f"{count} queued requests of version {version} have no host"
        fit = [
            worker
            for worker in state.index.idle.values()
            if worker.name not in state.residents
            and worker.name not in held
            and (worker.target > version or worker.name not in needed)
        ]
        if fit:
            first = min(fit, key=lambda one: _reluctance(one, needed, state.version))
            count = len(state.queues[version])
            return first, version, f"{count} queued requests of version {version} have no host"
    return None


def newest_assignments(
    state: State, admissible: int, held: frozenset[str] = frozenset()
) -> list[Assignment]:
    """Free workers for version t, while there is more to do than its workers have slots free.

    `admissible` groups may still be admitted; workers that are `held` get nothing.
    """
    if state.interruptible:
        return _interrupted(state)
    found = _beside(state)
    coming = sum(worker.free for worker, _, _ in found)
    return found + _idle_for_newest(state, admissible, coming, held)


def _beside(state: State) -> list[Assignment]:
    """Workers that host several versions take the newest at once."""
    found: list[Assignment] = []
    for worker in residents_for_newest(state):
        count = len(worker.requests)
        reason = f"version {state.version} is there, {count} requests of {worker.name} keep theirs"
        found.append((worker, state.version, reason))
    return found


def _idle_for_newest(
    state: State, admissible: int, coming: int, held: frozenset[str]
) -> list[Assignment]:
    """Idle workers of one version each; so many slots come to the newest version anyway."""
    newest, idle = state.version, state.index.idle
    wanted, free_slots = wanted_of_newest(state, admissible), state.index.free(newest) + coming
    if not idle or wanted <= free_slots:
        return []
    needed = _needed(state)
    kept_ = needed | state.residents.keys() | held
    free = [one for one in idle.values() if one.target != newest and one.name not in kept_]
    found: list[Assignment] = []
    for worker in sorted(free, key=lambda one: (one.target, one.name)):
        if wanted <= free_slots:
            break
        had = f"has run out of version {worker.target}" if worker.target >= 0 else "hosts nothing"
        reason = f"version {newest} has {wanted} requests for {free_slots} free slots, "
        found.append((worker, newest, f"{reason}{worker.name} {had}"))
        free_slots += worker.slots
    return found


def may_be_interrupted(state: State, worker: Worker) -> bool:
    """Whether all that a worker has may go on under another version; evaluations may not."""
    return all(state.groups[group_of(one)].spec.purpose == "train" for one in worker.requests)


def _interrupted(state: State) -> list[Assignment]:
    """Every worker takes the newest version at once, unless an evaluation needs the one it has."""
    newest, found = state.version, []
    for version in sorted(state.index.hosts):
        if version == newest or version in state.queues:
            continue
        workers = state.index.hosts[version].workers
        for name in sorted(workers):
            worker = workers[name]
            if not worker.loading and may_be_interrupted(state, worker):
                count = len(worker.requests)
                found.append(
                    (
                        worker,
                        newest,
                        f"version {newest} is there, {count} requests of {name} go on under it",
                    )
                )
    return found


def wanted_of_newest(state: State, admissible: int) -> int:
    """Requests that the newest version has a slot for if one is free."""
    assert state.config is not None
    groups = state.config.groups
    queued = len(state.queues.get(state.version, ()))
    return admissible * (groups.size + groups.spare) + queued


def places(state: State, version: int, spared: set[str]) -> Iterator[Worker]:
    """Where the queued requests of a version may go, one by one.

    Yields a worker with room for each request; the caller places it before it asks for the next.
    """
    newest = version == state.version
    if state.residents and not newest:
        yield from _places_of_older(state, version, spared)
        return
    hosts = state.index.hosts.get(version)
    if hosts is None:
        return
    all_needed = hosts.load + len(state.queues[version]) >= hosts.slots
    if not spared and (newest or all_needed):
        while (worker := hosts.roomiest()) is not None:
            yield worker
        return
    workers = list(hosts.workers.values()) if newest else kept(state, version)
    workers = [one for one in workers if one.name not in spared]
    yield from spread(workers) if newest else pack(state, workers)


def _places_of_older(state: State, version: int, spared: set[str]) -> Iterator[Worker]:
    """Where some workers host several versions: first on those, then where it is packed."""
    yield from spread(open_holders(state, version), all_open=True)
    single = (one for one in kept(state, version) if one.name not in state.residents)
    yield from pack(state, [one for one in single if one.name not in spared])


def victims(state: State) -> set[str]:
    """Workers that get nothing new, so that versions without a host find one.

    As many orphans as there are workers that are being emptied have theirs on the way.
    """
    waiting = orphans(state)
    if not waiting:
        return set()
    found = set(state.index.emptying) - state.residents.keys()
    busy = newest_and_emptiest(state)
    for version in waiting[len(found) :]:
        fit = (one for one in busy if one.target > version and one.name not in found)
        found.update(one.name for one in [next(fit, None)] if one is not None)
    return found


def newest_and_emptiest(state: State) -> list[Worker]:
    """Usable workers with one version: whom it costs least to give up comes first."""
    hosts = state.index.hosts.items()
    busy = [one for version, found in hosts if version >= 0 for one in found.workers.values()]
    busy = [one for one in busy if one.name not in state.residents]
    return sorted(busy, key=lambda one: (-one.target, one.present, one.name))


def spread(workers: Iterable[Worker], *, all_open: bool = False) -> Iterator[Worker]:
    """The worker with the most free slots, again and again; prefetch when no slot is free."""
    heap = [(one.load - one.slots, one.name, one) for one in workers if all_open or one.open]
    heapq.heapify(heap)
    while heap:
        worker = heap[0][2]
        yield worker
        if worker.room > 0:
            heapq.heapreplace(heap, (worker.load - worker.slots, worker.name, worker))
        else:
            heapq.heappop(heap)


def pack(state: State, workers: list[Worker]) -> Iterator[Worker]:
    """The given workers in order: first into all of their slots, then ahead of them."""
    for level in range(2):
        for worker in workers:
            most = (worker.slots, worker.slots + worker.prefetch)
            while worker.open and worker.load < most[level]:
                yield worker


def _needed(state: State) -> set[str]:
    """Names of the idle workers that versions with queued requests need."""
    found: set[str] = set()
    for version in state.queues:
        if version == state.version:
            found.update(one.name for one in state.index.idle.values() if one.target == version)
        else:
            found.update(_needed_of(state, version))
    return found


def _needed_of(state: State, version: int) -> list[str]:
    """Idle workers among those `kept` of an older version, without looking at all of them."""
    hosts = state.index.hosts.get(version)
    idle = sorted(one.name for one in state.index.idle.values() if one.target == version)
    if hosts is None or not idle:
        return []
    slots = [hosts.workers[name].slots for name in idle]
    need = hosts.load + len(state.queues[version]) - (hosts.slots - sum(slots))
    found = []
    for name, size in zip(idle, slots, strict=True):
        if need <= 0:
            break
        need -= size
        found.append(name)
    return found


def _reluctance(worker: Worker, needed: set[str], newest: int) -> tuple[bool, bool, int, str]:
    """Sorts who shall be assigned first: who is not needed, hosts nothing, then by name."""
    return worker.name in needed, worker.target == newest, worker.target, worker.name


VERSIONS_MAX: Final = 1024
"""A worker that claims to host more versions at once is not believed."""


def has_version(state: State, worker: Worker, version: int) -> bool:
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


def needed_versions(state: State, worker: Worker) -> set[int]:
    """The versions that a worker must not drop."""
    held = state.residents[worker.name].held
    running = {state.groups[group_of(one)].spec.version for one in worker.requests}
    return running | (state.queues.keys() & set(held))


def versions_to_drop(state: State, worker: Worker, version: int) -> tuple[int, ...] | None:
    """What a worker lets go of when it is assigned a version; None if it has no room for it."""
    residence = state.residents[worker.name]
    used = needed_versions(state, worker) | {version}
    found = [one for one in residence.held if one not in state.pins and one not in used]
    others = [one for one in residence.held if one not in used and one not in found]
    over = len({*residence.held, version}) - len(found) - residence.most
    if over > len(others):
        return None
    return tuple(sorted(found + others[: max(0, over)]))


def assign_error(state: State, worker: Worker, version: int, drop: tuple[int, ...]) -> str:
    """Why a worker must not be assigned this version and drop those; empty if it may."""
    residence = state.residents.get(worker.name)
    if residence is None:
        return f"{worker.name} has one version and drops {drop}" if drop else ""
    rest = {*residence.held, version}.difference(drop)
    if set(drop) - set(residence.held) or version not in rest:
        return f"{worker.name} does not have what it is to drop"
    if needed_versions(state, worker).intersection(drop):
        return f"{worker.name} has requests of what it is to drop"
    return f"{worker.name} has no room for version {version}" if len(rest) > residence.most else ""


def resident_for_orphan(state: State, version: int) -> Worker | None:
    """The emptiest worker that has room for an older version that nobody has."""
    found = [
        worker
        for worker in (state.workers[name] for name in sorted(state.residents))
        if _may_change(worker) and versions_to_drop(state, worker, version) is not None
    ]
    return min(found, key=lambda one: (one.load - one.slots, one.name), default=None)


def residents_for_newest(state: State) -> list[Worker]:
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
            if _may_change(worker) and versions_to_drop(state, worker, state.version) is not None:
                found.append(worker)
    return found


def _may_change(worker: Worker) -> bool:
    return worker.usable and worker.settled
