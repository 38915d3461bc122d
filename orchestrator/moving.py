"""Decides which running requests move to another worker of their version.

Four occasions: an elastic worker that is to sleep, a worker that is drained, a worker whose KV
cache is too full, and *consolidation*:
the requests of an older version run on as few workers as their slots allow, and a worker that is
emptied so is given to the newest version.

Hysteresis, so that nothing goes to and fro:

1. It is looked at anew only after a trigger (`State.trigger`): a step was committed, a worker
   joined, is ready, left, is idle or under pressure, a user's command, the planning period. One
   more finished request is none. While a version has no host, every plan looks.
2. Nothing moves unless the newest version has requests that wait for a slot.
3. A move has to pay: the slots that become free so much earlier count more than the time for which
   the moved requests stand still, `MOVE_GAIN_MIN` times. A worker has to have served for as long as
   it took to load, and a request to have run `MOVE_COOLDOWN` stalls since it moved last; its moves
   are bounded.
4. What is on its way counts where it goes: a worker that is being emptied counts as free.

The caller applies each move before it asks for the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from dora_pipe.orchestrator import elastic, hosting
from dora_pipe.orchestrator.estimates import Outlook
from dora_pipe.orchestrator.state import KV_PRESSURE, Request, State, Worker

MOVES_MAX: Final = 3
"""Moves of one request, except away from a worker that is drained."""

MOVE_GAIN_MIN: Final = 2
"""The slot time that a move wins is so many times that which it costs."""

MOVE_COOLDOWN: Final = 4
"""Between two moves a request runs so many times as long as a move lets it stand still."""

RELIEF: Final = 0.9
"""A worker under pressure lets go until its cache is expected below this share of the threshold."""

Moved = tuple[str, Worker | None, str]
"""(trajectory, worker that shall go on with it, reason); None: whichever is free."""


def moves(state: State, admissible: int) -> Iterator[Moved]:
    """What shall move now; `admissible` groups may still be admitted."""
    assert state.config is not None
    orphans = hosting.orphans(state)
    if state.interruptible:
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
    """Free slots of the given workers, fewest first: the fullest become quite full."""

    def __init__(self, workers: Iterable[Worker]) -> None:
        open_ = [one for one in workers if _free_slots_on(one)]
        open_.sort(key=lambda one: (one.slots - one.load, one.name), reverse=True)
        self._open = open_
        self.free = sum(map(_free_slots_on, open_))
        """How many there are."""

    def take(self) -> Worker | None:
        """A worker with a free slot; the caller moves a request there."""
        while self._open:
            if _free_slots_on(self._open[-1]):
                self.free -= 1
                return self._open[-1]
            self._open.pop()
        return None


def _free_slots_on(worker: Worker) -> int:
    """Slots that are free now; one that a request has not left yet is not."""
    if not worker.moves or not worker.open:
        return 0
    return max(0, min(worker.slots - worker.load, worker.room))


def _to_sleep(state: State) -> Iterator[Moved]:
    """A step does not wait for slots elsewhere: what an elastic worker has queues."""
    for worker in elastic.letting_go(state):
        for name in staying(state, worker):
            yield name, None, f"{worker.name} is to sleep; {len(worker.requests)} requests queue"


def _drained(state: State) -> Iterator[Moved]:
    """What a drained worker has goes where slots are free; the rest is finished there."""
    free_slots: dict[int, _FreeSlots] = {}
    for name in sorted(state.index.draining):
        worker = state.index.draining[name]
        if worker.drain == "told" and worker.moves:
            yield from _off(state, worker, staying(state, worker), free_slots, f"{name} is drained")


def _relieved(state: State) -> Iterator[Moved]:
    """The newest requests leave a worker whose KV cache is too full: they have least to carry."""
    assert state.config is not None
    free_slots: dict[int, _FreeSlots] = {}
    for name in sorted(state.index.pressed):
        worker = state.index.pressed[name]
        if worker.leaving or not worker.moves or not worker.requests:
            continue
        most = RELIEF * KV_PRESSURE * worker.kv_tokens
        share = 1 - most / worker.pressed
        cached = max(1, len(worker.requests) - worker.off_engine)  # The others have no cache.
        count = min(cached - 1, int(share * cached) + 1)
        newest = sorted(worker.requests, key=lambda one: (-state.requests[one].began_ns, one))
        chosen = [one for one in newest if _may_move(state, state.requests[one], rested=True)]
        full = f"the KV cache of {name} holds {worker.pressed} of {worker.kv_tokens} tokens"
        yield from _off(state, worker, chosen[:count], free_slots, full)


def _off(
    state: State, worker: Worker, names: list[str], free_slots: dict[int, _FreeSlots], why: str
) -> Iterator[Moved]:
    """Take these requests off a worker as far as others of their version have slots free."""
    for name in names:
        version = _version(state, name)
        if version not in free_slots:
            free_slots[version] = _FreeSlots(
                one for one in _hosts(state, version) if one is not worker
            )
        to = free_slots[version].take()
        if to is not None and to is not worker:
            yield name, to, f"{why}; {to.name} has {to.slots - to.load} slots free"


def _for_newest(state: State, admissible: int) -> Iterator[Moved]:
    """Empty workers of older versions, emptiest first, while the newest has too few slots free."""
    wanted = hosting.wanted_of_newest(state, admissible)
    emptying = state.index.emptying.values()
    coming = sum(one.slots for one in emptying if one.target != state.version)
    have = state.index.free(state.version) + coming
    if wanted <= have:
        return
    outlook = Outlook(state.seen)
    spare, free_slots = _spare(state)
    for worker in sorted(spare, key=lambda one: (one.load, one.name)):
        if wanted <= have:
            return
        names = staying(state, worker)
        if not _fits(state, worker, names, free_slots[worker.target].free, rested=True):
            continue
        if not _pays(state, worker, names, min(worker.slots, wanted - have), outlook):
            continue
        have += worker.slots
        why = f"frees {worker.name} for version {state.version}, {wanted} requests of which wait"
        yield from _empty(worker, names, free_slots[worker.target], why)


def _for_orphans(state: State, orphans: list[int]) -> Iterator[Moved]:
    """Empty a worker for each version without a host: a spare one, else one of a newer version."""
    spare, free_slots = _spare(state)
    spare.sort(key=lambda one: (one.load, one.name))
    spared = {one.name for one in spare}
    for version in orphans[len(state.index.emptying) :]:
        newer = [one for one in hosting.newest_and_emptiest(state) if one.target > version]
        for worker in [*spare, *newer]:
            names = staying(state, worker)
            at = free_slots[worker.target] if worker.name in spared else _fellows(state, worker)
            if not names or not _fits(state, worker, names, at.free, rested=False):
                continue
            yield from _empty(worker, names, at, f"version {version} has no host")
            break


def _empty(worker: Worker, names: list[str], free_slots: _FreeSlots, why: str) -> Iterator[Moved]:
    for name in names:
        to = free_slots.take()
        assert to is not None, "it fitted"
        count = f"its {len(names)} requests of version {worker.target} fit elsewhere"
        yield name, to, f"{why}: {count}, {to.name} has {to.slots - to.load} slots free"


def _spare(state: State) -> tuple[list[Worker], dict[int, _FreeSlots]]:
    """Of older versions: workers whose requests fit into the others' slots, and those slots."""
    spare: list[Worker] = []
    free_slots: dict[int, _FreeSlots] = {}
    for version in sorted(state.index.hosts):
        hosts = state.index.hosts[version]
        if not 0 <= version < state.version or not hosts.free:
            continue
        kept = hosting.kept(state, version)
        names = {one.name for one in kept}
        names.update(state.residents)
        rest = [one for one in hosts.workers.values() if one.name not in names and one.load]
        if rest:
            free_slots[version] = _FreeSlots(kept)
            spare += rest
    return spare, free_slots


def _hosts(state: State, version: int) -> list[Worker]:
    """The workers that have a version, alone or beside others."""
    hosts = state.index.hosts.get(version)
    alone = hosts.workers.values() if hosts is not None else ()
    single = [one for one in alone if one.name not in state.residents]
    return single + hosting.holders(state, version)


def _fellows(state: State, worker: Worker) -> _FreeSlots:
    """Slots of the other workers of the same version."""
    workers = state.index.hosts[worker.target].workers.values()
    return _FreeSlots(one for one in workers if one is not worker)


def staying(state: State, worker: Worker) -> list[str]:
    """Requests of a worker that do not move yet, by id."""
    return sorted(one for one in worker.requests if state.requests[one].moving is None)


def _fits(state: State, worker: Worker, names: list[str], free: int, *, rested: bool) -> bool:
    """Whether a worker can be emptied: all it has may move, and others have slots for it."""
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


def _pays(state: State, worker: Worker, names: list[str], slots: int, outlook: Outlook) -> bool:
    """Whether the slots won, for as long as the longest request would run on, are worth it.

    Emptied now, a worker is free after one stall; left alone, when its longest request has ended.
    What loading the next version costs is paid either way.
    """
    ages = (state.now_ns - state.requests[name].began_ns for name in names)
    longest_ns = max((outlook.left_ns(age) for age in ages), default=0)
    won_ns = slots * (longest_ns - outlook.stall_ns)
    return won_ns >= MOVE_GAIN_MIN * len(names) * outlook.stall_ns


def _version(state: State, name: str) -> int:
    return state.groups[state.requests[name].group].spec.version
