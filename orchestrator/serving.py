"""Assignment of versions to workers, and placement of queued requests.

Plans use targets: a loading worker counts for its assigned version, a moving request for its
destination. A worker keeps its version until it is *idle*: no open or arriving requests, nothing
loading. An older version *keeps* only as many workers as its requests need slots, fullest first;
the others run empty or are emptied (`moving`).

A version with queued requests and no worker is an *orphan*. While one exists, nothing is admitted,
and one worker of a newer version per orphan, newest and emptiest first, is a *victim*: it gets no
new requests until it can be assigned. This terminates: open requests only decrease, and a version
is disturbed only for an older one.

Workers in `State.residents` host several versions (adapters of one base model). They load the
newest version immediately; requests keep theirs. A version is *needed* there while an open or
queued request uses it. An assignment drops versions without open groups, then the oldest not
needed; without room the worker accepts no version.

A plan must leave nothing to plan (`plan(apply(plan)) == ()`). The orders below ensure that placing
requests does not change them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Final

from dora_pipe.orchestrator.entities import Worker
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.identity import group_of

Assignment = tuple[Worker, int, str]
"""(worker, version, reason)."""


def orphans(state: State) -> list[int]:
    """Return versions with queued requests and no worker, oldest first."""
    versions = state.index.orphans(state.queues)
    if versions and state.residents:
        return [version for version in versions if not holders(state, version)]
    return versions


def by_fullness(state: State, version: int) -> list[Worker]:
    """Return the workers of a version, fullest first, reassignable last."""
    idle = state.index.idle
    workers = state.index.hosts[version].workers.values()
    return sorted(workers, key=lambda worker: (-worker.load, worker.name in idle, worker.name))


def kept(state: State, version: int) -> list[Worker]:
    """Return the workers an older version needs, fullest first."""
    if version not in state.index.hosts:
        return []
    need = state.index.hosts[version].load + len(state.queues.get(version, ()))
    workers: list[Worker] = []
    for worker in by_fullness(state, version):
        if need <= 0:
            break
        need -= worker.slots
        workers.append(worker)
    return workers


def orphan_assignment(state: State, held: frozenset[str] = frozenset()) -> Assignment | None:
    """Return a worker for the oldest orphan: multi-version with room, else idle and not `held`."""
    waiting = orphans(state)
    if not waiting or not (state.index.idle or state.residents):
        return None
    needed = _needed(state)
    for version in waiting:
        reason = f"{len(state.queues[version])} queued requests of version {version} have no host"
        if (shared := resident_for_orphan(state, version)) is not None:
            return shared, version, reason
        fit = [
            worker
            for worker in state.index.idle.values()
            if worker.name not in state.residents
            and worker.name not in held
            and (worker.target > version or worker.name not in needed)
        ]
        if fit:
            first = min(fit, key=lambda worker: _reluctance(worker, needed, state.version))
            return first, version, reason
    return None


def newest_assignments(
    state: State, admissible: int, held: frozenset[str] = frozenset()
) -> list[Assignment]:
    """Assign free workers to version t while its work exceeds its free slots."""
    if state.partial_rollout:
        return _interrupted(state)
    assignments = _beside(state)
    coming = sum(worker.free for worker, _, _ in assignments)
    return assignments + _idle_for_newest(state, admissible, coming, held)


def _beside(state: State) -> list[Assignment]:
    assignments: list[Assignment] = []
    for worker in residents_for_newest(state):
        count = len(worker.requests)
        reason = f"version {state.version} is there, {count} requests of {worker.name} keep theirs"
        assignments.append((worker, state.version, reason))
    return assignments


def _idle_for_newest(
    state: State, admissible: int, coming: int, held: frozenset[str]
) -> list[Assignment]:
    newest, idle = state.version, state.index.idle
    waiting, free_slots = wanted_of_newest(state, admissible), state.index.free(newest) + coming
    if not idle or waiting <= free_slots:
        return []
    needed = _needed(state)
    kept_ = needed | state.residents.keys() | held
    free = [
        worker for worker in idle.values() if worker.target != newest and worker.name not in kept_
    ]
    assignments: list[Assignment] = []
    for worker in sorted(free, key=lambda other: (other.target, other.name)):
        if waiting <= free_slots:
            break
        had = f"has run out of version {worker.target}" if worker.target >= 0 else "hosts nothing"
        reason = f"version {newest} has {waiting} requests for {free_slots} free slots, "
        assignments.append((worker, newest, f"{reason}{worker.name} {had}"))
        free_slots += worker.slots
    return assignments


def may_be_interrupted(state: State, worker: Worker) -> bool:
    """Report whether a worker's requests may continue under another version."""
    return all(state.groups[group_of(name)].spec.purpose == "train" for name in worker.requests)


def _interrupted(state: State) -> list[Assignment]:
    newest, assignments = state.version, []
    for version in sorted(state.index.hosts):
        if version == newest or version in state.queues:
            continue
        workers = state.index.hosts[version].workers
        for name in sorted(workers):
            worker = workers[name]
            if not worker.loading and may_be_interrupted(state, worker):
                count = len(worker.requests)
                assignments.append(
                    (
                        worker,
                        newest,
                        f"version {newest} is there, {count} requests of {name} go on under it",
                    )
                )
    return assignments


def wanted_of_newest(state: State, admissible: int) -> int:
    """Return requests of the newest version that could use a slot."""
    assert state.config is not None
    rollout = state.config.rollout
    queued = len(state.queues.get(state.version, ()))
    return admissible * (rollout.group_size + rollout.group_redundancy) + queued


def open_workers(state: State, version: int, spared: set[str]) -> Iterator[Worker]:
    """Yield a worker per queued request; the caller places it before the next."""
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
    workers = [worker for worker in workers if worker.name not in spared]
    yield from spread(workers) if newest else pack(state, workers)


def _places_of_older(state: State, version: int, spared: set[str]) -> Iterator[Worker]:
    yield from spread(open_holders(state, version), all_open=True)
    single = (worker for worker in kept(state, version) if worker.name not in state.residents)
    yield from pack(state, [worker for worker in single if worker.name not in spared])


def victims(state: State) -> set[str]:
    """Return workers that get no new requests, to serve orphans."""
    waiting = orphans(state)
    if not waiting:
        return set()
    names = set(state.index.emptying) - state.residents.keys()
    busy = newest_and_emptiest(state)
    for version in waiting[len(names) :]:
        fit = (worker for worker in busy if worker.target > version and worker.name not in names)
        names.update(worker.name for worker in [next(fit, None)] if worker is not None)
    return names


def newest_and_emptiest(state: State) -> list[Worker]:
    """Return single-version workers, cheapest to give up first."""
    hosts = state.index.hosts.items()
    busy = [worker for version, host in hosts if version >= 0 for worker in host.workers.values()]
    busy = [worker for worker in busy if worker.name not in state.residents]
    return sorted(busy, key=lambda worker: (-worker.target, worker.present, worker.name))


def spread(workers: Iterable[Worker], *, all_open: bool = False) -> Iterator[Worker]:
    """Yield the worker with the most free slots repeatedly, then prefetch room."""
    heap = [
        (worker.load - worker.slots, worker.name, worker)
        for worker in workers
        if all_open or worker.open
    ]
    heapq.heapify(heap)
    while heap:
        worker = heap[0][2]
        yield worker
        if worker.room > 0:
            heapq.heapreplace(heap, (worker.load - worker.slots, worker.name, worker))
        else:
            heapq.heappop(heap)


def pack(state: State, workers: list[Worker]) -> Iterator[Worker]:
    """Yield workers in order: all slots, then prefetch."""
    for level in range(2):
        for worker in workers:
            most = (worker.slots, worker.slots + worker.prefetch)
            while worker.open and worker.load < most[level]:
                yield worker


def _needed(state: State) -> set[str]:
    """Return idle workers that queued requests of their version need."""
    idle, names = state.index.idle, set[str]()
    for version in state.queues:
        if version == state.version:
            names.update(worker.name for worker in idle.values() if worker.target == version)
        else:
            names.update(worker.name for worker in kept(state, version) if worker.name in idle)
    return names


def _reluctance(worker: Worker, needed: set[str], newest: int) -> tuple[bool, bool, int, str]:
    return worker.name in needed, worker.target == newest, worker.target, worker.name


VERSIONS_MAX: Final = 1024
"""Maximum accepted from a worker."""


def has_version(state: State, worker: Worker, version: int) -> bool:
    """Report whether a worker can sample under a version."""
    residence = state.residents.get(worker.name)
    if residence is None:
        return worker.target == worker.served == version
    return version in residence.held


def holders(state: State, version: int) -> list[Worker]:
    """Return usable multi-version workers with a version."""
    return [
        worker
        for name in sorted(state.residents)
        if version in state.residents[name].held and (worker := state.workers[name]).usable
    ]


def open_holders(state: State, version: int) -> list[Worker]:
    """Return `holders` that accept requests, even while loading."""
    return [worker for worker in holders(state, version) if not worker.pressed and worker.room > 0]


def needed_versions(state: State, worker: Worker) -> set[int]:
    """Return versions a worker must not drop."""
    held = state.residents[worker.name].held
    running = {state.groups[group_of(name)].spec.version for name in worker.requests}
    return running | (state.queues.keys() & set(held))


def versions_to_drop(state: State, worker: Worker, version: int) -> tuple[int, ...] | None:
    """Return versions to drop for an assignment; None without room."""
    residence = state.residents[worker.name]
    used = needed_versions(state, worker) | {version}
    unpinned = [
        version for version in residence.held if version not in state.pins and version not in used
    ]
    pinned = [
        version for version in residence.held if version not in used and version not in unpinned
    ]
    over = len({*residence.held, version}) - len(unpinned) - residence.most
    if over > len(pinned):
        return None
    return tuple(sorted(unpinned + pinned[: max(0, over)]))


def assign_error(state: State, worker: Worker, version: int, drop: tuple[int, ...]) -> str:
    """Return why an assignment is illegal; empty if legal."""
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
    """Return the emptiest multi-version worker with room for an orphan."""
    workers = [
        worker
        for worker in (state.workers[name] for name in sorted(state.residents))
        if _may_change(worker) and versions_to_drop(state, worker, version) is not None
    ]
    return min(workers, key=lambda worker: (worker.load - worker.slots, worker.name), default=None)


def residents_for_newest(state: State) -> list[Worker]:
    """Return multi-version workers with room that lack the newest."""
    residents: list[Worker] = []
    if not state.residents:
        return residents
    for version in sorted(state.index.hosts):
        if version == state.version:
            continue
        workers = state.index.hosts[version].workers
        for name in sorted(workers.keys() & state.residents.keys()):
            worker = workers[name]
            if _may_change(worker) and versions_to_drop(state, worker, state.version) is not None:
                residents.append(worker)
    return residents


def _may_change(worker: Worker) -> bool:
    return worker.usable and worker.settled
