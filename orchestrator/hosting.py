"""Decides which worker hosts which version, and where queued requests may go.

Theory of operation. Everything is planned on targets: a worker counts for the version it was
assigned, whether or not it has loaded it. A worker keeps its version until it is *idle*: no open
request, nothing loading. Of an older version only as many workers are *kept* as its open requests
need slots, the fullest first; the others get nothing new, run empty and are free.

A version with queued requests and no worker is an *orphan*. Orphans come before new work: while
there is one, nothing is admitted, and for every orphan one worker of a newer version, the newest
and emptiest first, is a *victim*: it gets nothing new, so that it runs empty and can be assigned.
This ends: admission stands still, so open requests only become fewer, and a version is only ever
disturbed for an older one. It also works with a single worker.

Warning: a plan must leave nothing to plan (`plan(apply(plan)) == ()`). The orders below are chosen
so that placing requests does not change them: what is fullest only gets fuller, what is emptiest
and spared stays emptiest.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from dora_pipe.orchestrator.state import State, Worker


def hosts(state: State) -> dict[int, list[Worker]]:
    """Usable workers by target; -1 for those without a version."""
    found: dict[int, list[Worker]] = {}
    for worker in state.workers.values():
        if worker.usable:
            found.setdefault(worker.target, []).append(worker)
    return found


def orphans(state: State, hosted: dict[int, list[Worker]]) -> list[int]:
    """Versions with queued requests and no worker, oldest first."""
    return sorted(version for version in state.queues if version not in hosted)


def kept(state: State, version: int, workers: list[Worker]) -> list[Worker]:
    """The workers of an older version that its open requests need, fullest first."""
    need = sum(len(one.requests) for one in workers) + len(state.queues.get(version, ()))
    found: list[Worker] = []
    for worker in sorted(workers, key=lambda one: (-len(one.requests), one.name)):
        if need <= 0:
            break
        need -= worker.slots
        found.append(worker)
    return found


def any_idle(state: State) -> bool:
    """Whether there is a worker that could be assigned another version now."""
    return any(_idle(worker) for worker in state.workers.values())


def next_assignment(state: State, admissible: int) -> tuple[Worker, int, str] | None:
    """The next (worker, version, reason) to assign; `admissible` groups may still be admitted."""
    hosted = hosts(state)
    needed = _needed(state, hosted)
    for version in orphans(state, hosted):
        fit = [
            worker
            for worker in state.workers.values()
            if _idle(worker) and (worker.target > version or worker.name not in needed)
        ]
        if fit:
            first = min(fit, key=lambda one: _reluctance(one, needed, state.version))
            return first, version, f"{len(state.queues[version])} queued requests have no host"
    return _for_newest(state, hosted, needed, admissible)


def _for_newest(
    state: State, hosted: dict[int, list[Worker]], needed: set[str], admissible: int
) -> tuple[Worker, int, str] | None:
    """A free worker for version t, while there is more to do than its workers have slots free."""
    assert state.config is not None
    newest = state.version
    wanted = admissible * state.config.groups.size + len(state.queues.get(newest, ()))
    free_slots = sum(max(0, one.slots - len(one.requests)) for one in hosted.get(newest, ()))
    if wanted <= free_slots:
        return None
    free = [
        worker
        for worker in state.workers.values()
        if _idle(worker) and worker.target != newest and worker.name not in needed
    ]
    if not free:
        return None
    first = min(free, key=lambda one: _reluctance(one, needed, newest))
    return first, newest, f"{wanted} requests for {free_slots} free slots of the newest"


def placements(state: State) -> Iterator[tuple[int, Iterator[Worker]]]:
    """For every version with queued requests, oldest first: where they may go, one by one.

    The second part yields a worker with room for each request; the caller places the request
    before it asks for the next one.
    """
    if not state.queues:
        return
    hosted = hosts(state)
    spared = victims(state, hosted)
    for version in sorted(state.queues):
        workers = hosted.get(version, [])
        if version == state.version:
            yield version, spread(one for one in workers if one.name not in spared)
        else:
            workers = kept(state, version, workers)
            yield version, pack([one for one in workers if one.name not in spared])


def victims(state: State, hosted: dict[int, list[Worker]]) -> set[str]:
    """Workers that get nothing new, so that versions without a host find one."""
    waiting = orphans(state, hosted)
    if not waiting:
        return set()
    busy = [worker for version in hosted for worker in hosted[version] if version >= 0]
    busy.sort(key=lambda one: (-one.target, len(one.requests), one.name))
    found: set[str] = set()
    for version in waiting:
        fit = (one for one in busy if one.target > version and one.name not in found)
        found.update(one.name for one in [next(fit, None)] if one is not None)
    return found


def spread(workers: Iterator[Worker]) -> Iterator[Worker]:
    """The worker with the most free slots, again and again; prefetch when no slot is free."""
    heap = [(len(one.requests) - one.slots, one.name, one) for one in workers if _open(one)]
    heapq.heapify(heap)
    while heap:
        worker = heap[0][2]
        yield worker
        if worker.room > 0:
            heapq.heapreplace(heap, (len(worker.requests) - worker.slots, worker.name, worker))
        else:
            heapq.heappop(heap)


def pack(workers: list[Worker]) -> Iterator[Worker]:
    """The given workers in order, first into their slots, then ahead of them."""
    for ahead in (False, True):
        for worker in workers:
            most = worker.slots + (worker.prefetch if ahead else 0)
            while _open(worker) and len(worker.requests) < most:
                yield worker


def _needed(state: State, hosted: dict[int, list[Worker]]) -> set[str]:
    """Names of the workers that versions with queued requests need."""
    found: set[str] = set()
    for version in state.queues:
        workers = hosted.get(version, [])
        if version != state.version:
            workers = kept(state, version, workers)
        found.update(worker.name for worker in workers)
    return found


def _idle(worker: Worker) -> bool:
    """Whether it may be assigned another version now."""
    return not worker.requests and not worker.loading and worker.usable


def _open(worker: Worker) -> bool:
    """Whether a request may be placed on it."""
    return worker.usable and not worker.loading and worker.room > 0


def _reluctance(worker: Worker, needed: set[str], newest: int) -> tuple[bool, bool, int, str]:
    """Sorts who shall be assigned first: who is not needed, hosts nothing, then by name."""
    return worker.name in needed, worker.target == newest, worker.target, worker.name
