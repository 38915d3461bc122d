"""Keeps what would have to be looked for among all workers, groups and requests; it decides nothing
but the order in which queued requests are placed, oldest deadline first.

Everything here follows from `State.workers` and `State.groups` and is no part of the state's
digest: whoever changes a worker calls `touch`, a group that begins or ends to generate is told, and
a test finds the whole index again from scratch after every kind of run. With it a round costs as
much as what has changed, however many workers and groups there are.

Warning: nothing here may depend on the order of changes, since a state that was folded from the log
came to be in another order than the one that wrote it. Iterate sorted, or by a key without ties.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, Final, NamedTuple

from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.rounds import NO_VERSION, GroupSpec

if TYPE_CHECKING:
    from dora_pipe.orchestrator.state import Worker

STALE_MIN: Final = 64
"""A heap may hold so many entries that are out of date, whatever its size."""

STALE_TIMES: Final = 4
"""Beyond `STALE_MIN`, entries per worker at which a heap is built anew."""


@dataclass(slots=True)
class Hosts:
    """The usable workers whose target is one version."""

    workers: dict[str, Worker] = field(default_factory=dict)
    slots: int = 0
    load: int = 0
    """Requests that need a slot there: without those that move away, with those that arrive."""
    free: int = 0
    """Slots that no request needs."""
    _heap: list[tuple[int, str]] = field(default_factory=list)
    """(load - slots, name) of workers with room, many of them out of date."""

    def offer(self, worker: Worker, load: int) -> None:
        """A worker with room, as it is now."""
        heap = self._heap
        heappush(heap, (load - worker.slots, worker.name))
        if len(heap) > STALE_MIN + STALE_TIMES * len(self.workers):
            open_ = [one for one in self.workers.values() if one.open]
            self._heap = [(one.load - one.slots, one.name) for one in open_]
            heapify(self._heap)

    def roomiest(self) -> Worker | None:
        """The worker with the most free slots, or room for prefetch if no slot is free."""
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
    """What the index counts a worker as; `target` is None for one that is not usable."""

    target: int | None
    load: int
    free: int
    slots: int


@dataclass(slots=True)
class Index:
    """Example: ``index.hosts[7].free``: slots free on the workers of version 7."""

    hosts: dict[int, Hosts] = field(default_factory=dict)
    """By target; -1 for workers without a version. No empty one stays."""
    idle: dict[str, Worker] = field(default_factory=dict)
    """May be assigned another version now."""
    emptying: dict[str, Worker] = field(default_factory=dict)
    """Usable workers all of whose requests move away, and that do not sleep then."""
    silent: dict[str, Worker] = field(default_factory=dict)
    """To be fenced."""
    draining: dict[str, Worker] = field(default_factory=dict)
    """A user asked to drain them."""
    pressed: dict[str, Worker] = field(default_factory=dict)
    """Their KV cache is too full."""
    elastic: dict[str, Worker] = field(default_factory=dict)
    """They share their GPUs with the trainer."""
    generating: dict[int, dict[str, None]] = field(default_factory=dict)
    """Training groups some siblings of which run, by deadline, in the order of their dispatch. No
    empty one stays."""
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def touch(self, worker: Worker) -> None:
        """A worker has joined or has changed in any way."""
        seen = self._seen.get(worker.name)
        target = worker.target if worker.usable else None
        load = worker.load
        if seen is None or seen.target != target:
            self._rehost(worker, seen, target, load)
        elif target is not None:
            hosts, free = self.hosts[target], worker.free
            hosts.load += load - seen.load
            hosts.free += free - seen.free
            seen.load, seen.free = load, free
        if target is None:
            return
        if worker.open:
            self.hosts[target].offer(worker, load)
        # Whoever has requests that stay, as nearly everybody has, is in neither.
        if worker.present > worker.arriving:
            self.idle.pop(worker.name, None)
            self.emptying.pop(worker.name, None)
        else:
            _keep(self.idle, worker, not worker.requests and worker.settled)
            empties = bool(worker.leaving) and not worker.present and target != NO_VERSION
            _keep(self.emptying, worker, empties)

    def mark(self, worker: Worker) -> None:
        """As `touch`, and look at what changes rarely, or never: silence, drain, pressure."""
        self.touch(worker)
        _keep(self.silent, worker, worker.silent)
        _keep(self.draining, worker, worker.drain != "no")
        _keep(self.pressed, worker, worker.pressed > 0)
        _keep(self.elastic, worker, worker.elastic)

    def remove(self, worker: Worker) -> None:
        seen = self._seen.pop(worker.name)
        self._leave(worker, seen)
        lists = (self.idle, self.emptying, self.silent, self.draining, self.pressed, self.elastic)
        for kept in lists:
            kept.pop(worker.name, None)

    def begin(self, spec: GroupSpec) -> None:
        """A training group is dispatched; those before it were told before it."""
        self.generating.setdefault(spec.deadline, {})[spec.group] = None

    def end(self, spec: GroupSpec) -> None:
        """Nothing of a training group is waited for any more."""
        groups = self.generating[spec.deadline]
        del groups[spec.group]
        if not groups:
            del self.generating[spec.deadline]

    def orphans(self, versions: Iterable[int]) -> list[int]:
        """Those of the versions that no usable worker hosts, oldest first."""
        return sorted(one for one in versions if one not in self.hosts)

    def free(self, version: int) -> int:
        """Slots of a version that no request has or shall have."""
        hosts = self.hosts.get(version)
        return hosts.free if hosts is not None else 0

    def _rehost(self, worker: Worker, seen: _Seen | None, target: int | None, load: int) -> None:
        """A worker counts for another version, or for none."""
        if seen is not None:
            self._leave(worker, seen)
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

    def _leave(self, worker: Worker, seen: _Seen) -> None:
        if seen.target is None:
            return
        hosts = self.hosts[seen.target]
        del hosts.workers[worker.name]
        hosts.slots -= seen.slots
        hosts.load -= seen.load
        hosts.free -= seen.free
        if not hosts.workers:
            del self.hosts[seen.target]


def _keep(where: dict[str, Worker], worker: Worker, belongs: bool) -> None:
    if belongs:
        where[worker.name] = worker
    else:
        where.pop(worker.name, None)


RANK: dict[Purpose, int] = {"train": 0, "eval": 1}
"""Queued requests of training groups go before those of evaluation groups of the same version."""


class QueueKey(NamedTuple):
    """Place of a request in the queue of its version: what sorts first is placed first."""

    rank: int
    deadline: int
    ordinal: int
    sibling: int

    @property
    def trajectory(self) -> str:
        """Id of the request."""
        purpose: Purpose = "train" if self.rank == RANK["train"] else "eval"
        return trajectory_id(group_id(purpose, self.ordinal), self.sibling)


def queue_key(group: GroupSpec, sibling: int) -> QueueKey:
    """Where a request of this group queues: oldest deadline first, then ordinal, sibling."""
    return QueueKey(RANK[group.purpose], group.deadline, group.ordinal, sibling)


def push(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Into the queue of a version, at its place."""
    insort(queues.setdefault(version, []), key)


def pull(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Out of the queue of a version; it must be there."""
    queue = queues[version]
    place = bisect_left(queue, key)
    assert queue[place] == key, "the request is not queued"
    del queue[place]
    if not queue:
        del queues[version]
