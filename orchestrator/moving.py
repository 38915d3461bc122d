"""Moves of running requests to other workers of their version.

Reasons: colocated workers that sleep, drains, full KV caches, and *consolidation*: packing an older
version on few workers frees others for the newest. Against oscillation:

1. Plans consider moves only after a trigger (`State.trigger`), or while a version has no host.
2. Consolidation needs waiting requests of the newest version.
3. The slot time gained is at least `MOVE_GAIN_MIN` times the pauses. A worker must have served as
   long as it loaded, a request must have run `MOVE_COOLDOWN` pauses since its last move. Moves per
   request are bounded.
4. A worker being emptied counts as free.

Callers apply each move before the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dora_pipe.orchestrator import colocated, serving
from dora_pipe.orchestrator.entities import KV_PRESSURE, Request, Worker
from dora_pipe.orchestrator.estimates import Outlook
from dora_pipe.orchestrator.state import State

MOVES_MAX: Final = 3
"""Maximum per request, except from drained workers."""

MOVE_GAIN_MIN: Final = 2
"""Minimum ratio of slot time gained to lost."""

MOVE_COOLDOWN: Final = 4
"""Minimum run time between moves, in pauses."""

RELIEF: Final = 0.9
"""Share of the threshold to relieve a cache to."""

Moved = tuple[str, Worker | None, str]
"""(trajectory, destination or None for any, reason)."""


def moves(state: State, admissible: int) -> Iterator[Moved]:
    """Yield the moves due now."""
    assert state.config is not None
    orphans = serving.orphans(state)
    if state.partial_rollout:
        return
    yield from _to_sleep(state)
    if not (state.trigger or orphans):
        return
    yield from _drained(state)
    yield from _relieved(state)
    if orphans:
        yield from _for_orphans(state, orphans)
    else:
        yield from _for_newest(state, admissible)


class _FreeSlots:
    """Free slots, fewest first, so that the fullest workers fill up."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        open_ = [worker for worker in workers if _free_slots_on(worker)]
        open_.sort(key=lambda worker: (worker.slots - worker.load, worker.name), reverse=True)
        self._open = open_
        self.free = sum(map(_free_slots_on, open_))

    def take(self) -> Worker | None:
        """Return a worker for the caller to move a request to."""
        while self._open:
            if _free_slots_on(self._open[-1]):
                self.free -= 1
                return self._open[-1]
            self._open.pop()
        return None


def _free_slots_on(worker: Worker) -> int:
    if not worker.moves or not worker.open:
        return 0
    return max(0, min(worker.slots - worker.load, worker.room))


def _to_sleep(state: State) -> Iterator[Moved]:
    """Queue requests: a step does not wait for free slots."""
    for worker in colocated.emptying_before_sleep(state):
        for name in staying(state, worker):
            yield name, None, f"{worker.name} is to sleep; {len(worker.requests)} requests queue"


def _drained(state: State) -> Iterator[Moved]:
    free_slots: dict[int, _FreeSlots] = {}
    for name, worker in sorted(state.workers.items()):
        if worker.drain == "told" and worker.moves:
            yield from _off(state, worker, staying(state, worker), free_slots, f"{name} is drained")


def _relieved(state: State) -> Iterator[Moved]:
    """Move the newest requests: they have the least to transfer."""
    assert state.config is not None
    free_slots: dict[int, _FreeSlots] = {}
    for name, worker in sorted(state.workers.items()):
        if not worker.pressed or worker.leaving or not worker.moves or not worker.requests:
            continue
        most = RELIEF * KV_PRESSURE * worker.kv_tokens
        share = 1 - most / worker.pressed
        cached = max(1, len(worker.requests) - worker.off_engine)  # Only these have a cache.
        count = min(cached - 1, int(share * cached) + 1)
        newest = sorted(worker.requests, key=lambda name: (-state.requests[name].began_ns, name))
        chosen = [name for name in newest if _may_move(state, state.requests[name], rested=True)]
        full = f"the KV cache of {name} holds {worker.pressed} of {worker.kv_tokens} tokens"
        yield from _off(state, worker, chosen[:count], free_slots, full)


def _off(
    state: State, worker: Worker, names: list[str], free_slots: dict[int, _FreeSlots], why: str
) -> Iterator[Moved]:
    for name in names:
        version = _version(state, name)
        if version not in free_slots:
            free_slots[version] = _FreeSlots(
                host for host in _hosts(state, version) if host is not worker
            )
        to = free_slots[version].take()
        if to is not None and to is not worker:
            yield name, to, f"{why}; {to.name} has {to.slots - to.load} slots free"


def _for_newest(state: State, admissible: int) -> Iterator[Moved]:
    """Empty older workers, emptiest first."""
    needed = serving.wanted_of_newest(state, admissible)
    emptying = state.index.emptying.values()
    coming = sum(worker.slots for worker in emptying if worker.target != state.version)
    have = state.index.free(state.version) + coming
    if needed <= have:
        return
    outlook = Outlook(state.seen)
    spare, free_slots = _spare(state)
    for worker in sorted(spare, key=lambda other: (other.load, other.name)):
        if needed <= have:
            return
        names = staying(state, worker)
        if not _fits(state, worker, names, free_slots[worker.target].free, rested=True):
            continue
        if not _pays(state, names, min(worker.slots, needed - have), outlook):
            continue
        have += worker.slots
        why = f"frees {worker.name} for version {state.version}, {needed} requests of which wait"
        yield from _empty(worker, names, free_slots[worker.target], why)


def _for_orphans(state: State, orphans: list[int]) -> Iterator[Moved]:
    spare, free_slots = _spare(state)
    spare.sort(key=lambda worker: (worker.load, worker.name))
    spared = {worker.name for worker in spare}
    for version in orphans[len(state.index.emptying) :]:
        newer = [worker for worker in serving.newest_and_emptiest(state) if worker.target > version]
        for worker in [*spare, *newer]:
            names = staying(state, worker)
            slots = free_slots[worker.target] if worker.name in spared else _fellows(state, worker)
            if not names or not _fits(state, worker, names, slots.free, rested=False):
                continue
            yield from _empty(worker, names, slots, f"version {version} has no host")
            break


def _empty(worker: Worker, names: list[str], free_slots: _FreeSlots, why: str) -> Iterator[Moved]:
    for name in names:
        to = free_slots.take()
        assert to is not None, "it fitted"
        count = f"its {len(names)} requests of version {worker.target} fit elsewhere"
        yield name, to, f"{why}: {count}, {to.name} has {to.slots - to.load} slots free"


def _spare(state: State) -> tuple[list[Worker], dict[int, _FreeSlots]]:
    spare: list[Worker] = []
    free_slots: dict[int, _FreeSlots] = {}
    for version in sorted(state.index.hosts):
        hosts = state.index.hosts[version]
        if not 0 <= version < state.version or not hosts.free:
            continue
        kept = serving.kept(state, version)
        names = {worker.name for worker in kept}
        names.update(state.residents)
        rest = [
            worker for worker in hosts.workers.values() if worker.name not in names and worker.load
        ]
        if rest:
            free_slots[version] = _FreeSlots(kept)
            spare += rest
    return spare, free_slots


def _hosts(state: State, version: int) -> list[Worker]:
    hosts = state.index.hosts.get(version)
    alone = hosts.workers.values() if hosts is not None else ()
    single = [worker for worker in alone if worker.name not in state.residents]
    return single + serving.holders(state, version)


def _fellows(state: State, worker: Worker) -> _FreeSlots:
    workers = state.index.hosts[worker.target].workers.values()
    return _FreeSlots(other for other in workers if other is not worker)


def staying(state: State, worker: Worker) -> list[str]:
    """Return requests that are not moving."""
    return sorted(name for name in worker.requests if state.requests[name].moving is None)


def _fits(state: State, worker: Worker, names: list[str], free: int, *, rested: bool) -> bool:
    if not worker.moves or worker.loading or worker.arriving or len(names) > free:
        return False
    if rested and state.now_ns - worker.target_ns < worker.load_ns:
        return False
    return all(_may_move(state, state.requests[name], rested=rested) for name in names)


def _may_move(state: State, request: Request, *, rested: bool) -> bool:
    assert state.config is not None
    if request.moving is not None or state.groups[request.group].phase == "ending":
        return False
    if request.moves >= MOVES_MAX:
        return False
    rest_ns = MOVE_COOLDOWN * state.seen.stall_ns if rested and request.moves else 0
    return state.now_ns - request.moved_ns >= rest_ns


def _pays(state: State, names: list[str], slots: int, outlook: Outlook) -> bool:
    """Report whether the slots gained until the longest request ends are worth the pauses."""
    ages = (state.now_ns - state.requests[name].began_ns for name in names)
    longest_ns = max((outlook.left_ns(age) for age in ages), default=0)
    won_ns = slots * (longest_ns - outlook.stall_ns)
    return won_ns >= MOVE_GAIN_MIN * len(names) * outlook.stall_ns


def _version(state: State, name: str) -> int:
    return state.groups[state.requests[name].group].spec.version
