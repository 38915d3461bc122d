"""Derived indexes over workers, groups and requests, and the queue order.

Excluded from the digest. Call `touch` after changing a worker, `begin` or `end` for groups. Never
depend on the order of changes, which may differ in a folded state: iterate sorted.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from dora_pipe.orchestrator.entities import Worker
from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.rounds import NO_VERSION, GroupSpec

STALE_MIN: Final = 64
"""Outdated heap entries always tolerated."""

STALE_TIMES: Final = 4
"""Entries per worker at which a heap is rebuilt."""


@dataclass(slots=True)
class Hosts:
    """Usable workers of one target version."""

    workers: dict[str, Worker] = field(default_factory=dict)
    slots: int = 0
    load: int = 0
    """Requests that need a slot."""
    free: int = 0
    _heap: list[tuple[int, str]] = field(default_factory=list)
    """(load - slots, name), possibly outdated."""

    def offer(self, worker: Worker, load: int) -> None:
        """Add a worker with room."""
        heap = self._heap
        heappush(heap, (load - worker.slots, worker.name))
        if len(heap) > STALE_MIN + STALE_TIMES * len(self.workers):
            open_ = [worker for worker in self.workers.values() if worker.open]
            self._heap = [(worker.load - worker.slots, worker.name) for worker in open_]
            heapify(self._heap)

    def roomiest(self) -> Worker | None:
        """Return the worker with the most free slots, else prefetch room."""
        heap = self._heap
        while heap:
            key, name = heap[0]
            worker = self.workers.get(name)
            if worker is not None and worker.open and worker.load - worker.slots == key:
                return worker
            heappop(heap)
        return None


@dataclass(slots=True)
class _Seen:
    target: int | None
    load: int
    free: int
    slots: int


@dataclass(slots=True)
class Index:
    """Lookup tables of the planner. Example: ``index.hosts[7].free``"""

    hosts: dict[int, Hosts] = field(default_factory=dict)
    """By target; -1 without a version. No empty entries."""
    idle: dict[str, Worker] = field(default_factory=dict)
    """Workers that may be reassigned."""
    emptying: dict[str, Worker] = field(default_factory=dict)
    """Workers whose requests all move away, not to sleep."""
    colocated: dict[str, Worker] = field(default_factory=dict)
    """Colocated workers."""
    generating: dict[int, dict[str, None]] = field(default_factory=dict)
    """Generating groups by deadline, in dispatch order. No empty entries."""
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def touch(self, worker: Worker) -> None:
        """Update a worker."""
        before = self._seen.get(worker.name)
        target = worker.target if worker.usable else None
        load = worker.load
        if before is None or before.target != target:
            self._rehost(worker, before, target, load)
        elif target is not None:
            hosts, free = self.hosts[target], worker.free
            hosts.load += load - before.load
            hosts.free += free - before.free
            before.load, before.free = load, free
        if target is None:
            return
        if worker.open:
            self.hosts[target].offer(worker, load)
        # Common case: some requests stay.
        if worker.present > worker.arriving:
            self.idle.pop(worker.name, None)
            self.emptying.pop(worker.name, None)
        else:
            _keep(self.idle, worker, not worker.requests and worker.settled)
            empties = bool(worker.leaving) and not worker.present and target != NO_VERSION
            _keep(self.emptying, worker, empties)

    def remove(self, worker: Worker) -> None:
        self._withdraw(worker, self._seen.pop(worker.name))
        for workers in (self.idle, self.emptying, self.colocated):
            workers.pop(worker.name, None)

    def begin(self, spec: GroupSpec) -> None:
        """Add a training group, in dispatch order."""
        self.generating.setdefault(spec.deadline, {})[spec.group] = None

    def end(self, spec: GroupSpec) -> None:
        """Remove a training group."""
        groups = self.generating[spec.deadline]
        del groups[spec.group]
        if not groups:
            del self.generating[spec.deadline]

    def orphans(self, versions: Iterable[int]) -> list[int]:
        """Return the versions without a usable worker, oldest first."""
        return sorted(version for version in versions if version not in self.hosts)

    def free(self, version: int) -> int:
        """Return the free slots of a version."""
        hosts = self.hosts.get(version)
        return hosts.free if hosts is not None else 0

    def _rehost(self, worker: Worker, before: _Seen | None, target: int | None, load: int) -> None:
        if before is not None:
            self._withdraw(worker, before)
        elif worker.colocated:
            self.colocated[worker.name] = worker
        free = worker.free
        self._seen[worker.name] = _Seen(target, load, free, worker.slots)
        if target is None:
            self.idle.pop(worker.name, None)
            self.emptying.pop(worker.name, None)
            return
        hosts = self.hosts.setdefault(target, Hosts())
        hosts.workers[worker.name] = worker
        hosts.slots += worker.slots
        hosts.load += load
        hosts.free += free

    def _withdraw(self, worker: Worker, before: _Seen) -> None:
        if before.target is None:
            return
        hosts = self.hosts[before.target]
        del hosts.workers[worker.name]
        hosts.slots -= before.slots
        hosts.load -= before.load
        hosts.free -= before.free
        if not hosts.workers:
            del self.hosts[before.target]


def _keep(where: dict[str, Worker], worker: Worker, belongs: bool) -> None:
    if belongs:
        where[worker.name] = worker
    else:
        where.pop(worker.name, None)


RANK: dict[Purpose, int] = {"train": 0, "eval": 1}
"""Training goes before evaluation within a version."""


class QueueKey(NamedTuple):
    """Sort key of a queued request."""

    rank: int
    deadline: int
    ordinal: int
    sample: int

    @property
    def trajectory(self) -> str:
        """Id of the request."""
        purpose: Purpose = "train" if self.rank == RANK["train"] else "eval"
        return trajectory_id(group_id(purpose, self.ordinal), self.sample)


def queue_key(group: GroupSpec, sample: int) -> QueueKey:
    """Return the key: deadline, ordinal, sample index."""
    return QueueKey(RANK[group.purpose], group.deadline, group.ordinal, sample)


def push(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Insert in order."""
    insort(queues.setdefault(version, []), key)


def pull(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Remove; the key must be present."""
    queue = queues[version]
    position = bisect_left(queue, key)
    assert queue[position] == key, "the request is not queued"
    del queue[position]
    if not queue:
        del queues[version]
