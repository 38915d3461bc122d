"""Decides as other schedulers would, on production's state: planners for comparison only.

Production has one planner; these exist in the simulator. Each keeps production's admission, bound
and batches, and changes which worker hosts what:

- ``Proportional``: DORA's Algorithm 1. Workers are shared out over versions by their outstanding
  requests (largest remainder, at least one each); what runs on a worker that changes is *parked*,
  its KV cache kept aside, and queues for its version. Looked at after each step and each period.
- ``LegacyFill``: its step 4. A free slot of an older version gets a new group of that version,
  before the newest version gets one, as long as the bound allows.
"""

from __future__ import annotations

from typing import Final, Protocol

import msgspec

from dora_pipe.config.logged import settings_in_force
from dora_pipe.orchestrator import hosting
from dora_pipe.orchestrator.apply_decision import (
    apply_decision,
    next_training_row,
    pinned,
    train_spec,
)
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.planner import decide
from dora_pipe.orchestrator.staleness import admissible, feasible, in_flight_max, next_batch
from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.orchestrator.state_ops import admit, in_flight_due
from dora_pipe.schemas.rounds import AnyDecision, Assign, Dispatch, Place, PlacedSibling, TakeBatch

ANY_ROW: Final = Samplers(recorded={})
"""Which row a group gets makes no difference to a modelled cluster."""


class Planner(Protocol):
    """What a modelled cluster asks."""

    def decide(self, state: State) -> list[AnyDecision]:
        """What to decide now, already applied to `state`."""
        ...

    def park(self, state: State) -> list[str]:
        """Running requests to take off their workers, after a step and every period."""
        ...


class Production:
    """Production's planner, which parks nothing."""

    def decide(self, state: State) -> list[AnyDecision]:
        return decide(state, samplers=ANY_ROW)

    def park(self, state: State) -> list[str]:
        return []


class LegacyFill(Production):
    """See the head of this file."""

    def decide(self, state: State) -> list[AnyDecision]:
        """Groups of older versions first, then production's plan."""
        _fill_older(state)
        return decide(state, samplers=ANY_ROW)


class Proportional:
    """See the head of this file."""

    def park(self, state: State) -> list[str]:
        """What runs on the workers that a version has too many of."""
        return [name for worker in _surplus(state) for name in sorted(worker.requests)]

    def decide(self, state: State) -> list[AnyDecision]:
        """The batch, assignments by share, placements, new groups."""
        found: list[AnyDecision] = []
        for stage in (_take_batch, _assign_shares, _place_queued, _admit_newest):
            stage(state, found)
        return found


def shares(state: State) -> dict[int, int]:
    """Workers per version: by outstanding requests, largest remainder, at least one each.

    The newest version's outstanding requests include those that may still be admitted.
    """
    assert state.config is not None
    outstanding = {version: len(queue) for version, queue in state.queues.items()}
    for worker in state.workers.values():
        if worker.requests:
            outstanding[worker.target] = outstanding.get(worker.target, 0) + len(worker.requests)
    more = admissible(state.deadlines, state.standing()) * state.config.groups.size
    outstanding[state.version] = outstanding.get(state.version, 0) + more
    outstanding = {version: count for version, count in outstanding.items() if count}
    return largest_remainder(outstanding, len(state.workers))


def largest_remainder(weights: dict[int, int], seats: int) -> dict[int, int]:
    """Seats by weight, at least one for each (the oldest first, if there are too few).

    Example: ``largest_remainder({1: 1, 2: 9}, 4)`` is ``{1: 1, 2: 3}``.
    """
    keys = sorted(weights)[:seats]
    found = dict.fromkeys(keys, 1)
    rest, total = seats - len(keys), sum(weights[key] for key in keys)
    if not total:
        return found
    ideal = {key: max(0.0, weights[key] / total * seats - 1) for key in keys}
    scale = rest / (sum(ideal.values()) or 1.0)
    for key in keys:
        found[key] += int(ideal[key] * scale + 1e-9)
    left = seats - sum(found.values())
    order = sorted(keys, key=lambda key: (-(ideal[key] * scale % 1), key))
    for key in (order * seats)[:left]:
        found[key] += 1
    return found


def _by_version(state: State) -> dict[int, list[Worker]]:
    found: dict[int, list[Worker]] = {}
    for worker in state.workers.values():
        found.setdefault(worker.target, []).append(worker)
    return found


def _surplus(state: State) -> list[Worker]:
    """Workers that a version has beyond its share, the emptiest of it."""
    wanted = shares(state)
    if not wanted:
        return []
    found: list[Worker] = []
    for version, workers in _by_version(state).items():
        free = [one for one in workers if not one.loading]
        free.sort(key=lambda one: (len(one.requests), one.name))
        over = len(workers) - wanted.get(version, 0)
        found += free[: max(0, over)]
    return found


def _assign_shares(state: State, found: list[AnyDecision]) -> None:
    wanted = shares(state)
    hosted = {version: len(workers) for version, workers in _by_version(state).items()}
    for worker in _surplus(state):
        lacking = [v for v in sorted(wanted) if hosted.get(v, 0) < wanted[v]]
        if worker.requests or not lacking:
            continue
        version = lacking[0]
        _add(
            state,
            found,
            Assign(
                worker=worker.name,
                epoch=worker.epoch,
                version=version,
                digest=state.policies[version],
                reason=f"{wanted[version]} workers are version {version}'s share",
            ),
        )
        hosted[version] = hosted.get(version, 0) + 1


def _take_batch(state: State, found: list[AnyDecision]) -> None:
    at = state.standing()
    if at.training or at.step >= at.steps:
        return
    batch = next_batch(state.finished, state.deadlines, step=at.step, per_step=at.per_step)
    if not batch:
        return
    assert state.config is not None
    groups = tuple(state.groups[one.group].taken() for one in batch)
    settings = settings_in_force(state.config, at.step)
    reason = "the earliest deadlines"
    decision = TakeBatch(
        step=at.step,
        attempt=state.attempt,
        groups=groups,
        settings=settings,
        pins=pinned(state),
        in_flight=in_flight_due(state),
        reason=reason,
    )
    _add(state, found, decision)


def _place_queued(state: State, found: list[AnyDecision]) -> None:
    for version, workers in sorted(_by_version(state).items()):
        for worker in hosting.spread(iter(workers)):
            if version not in state.queues:
                break
            _place_first(state, found, version, worker)


def _admit_newest(state: State, found: list[AnyDecision]) -> None:
    if set(state.queues) - set(_by_version(state)):
        return
    workers = _by_version(state).get(state.version, [])
    for worker in hosting.spread(iter(workers)):
        if state.version not in state.queues:
            if not admissible(state.deadlines, state.standing()):
                return
            row = next_training_row(state, samplers=ANY_ROW)
            spec = train_spec(state, row)
            dispatch = Dispatch(spec=spec, reason="a slot is free", skipped=row.skipped)
            _add(state, found, dispatch)
        _place_first(state, found, state.version, worker)


def _place_first(state: State, found: list[AnyDecision], version: int, worker: Worker) -> None:
    request = state.requests[state.queues[version][0].trajectory]
    sibling = PlacedSibling(
        sibling=request.sibling, attempt=request.attempt + 1, resume=request.resume, kv=request.kv
    )
    place = Place(
        spec=state.groups[request.group].spec,
        worker=worker.name,
        epoch=worker.epoch,
        siblings=(sibling,),
        reason="its turn",
    )
    _add(state, found, place)


def _fill_older(state: State) -> None:
    """Admit groups under older versions whose workers have free slots, while the bound allows."""
    if state.config is None:
        return
    for version, workers in sorted(_by_version(state).items()):
        if version < 0 or version >= state.version or version not in state.policies:
            continue
        free = sum(max(0, one.slots - len(one.requests)) for one in workers if not one.loading)
        free -= len(state.queues.get(version, ()))
        while free > 0 and _may_admit_older(state, version):
            spec = train_spec(state, next_training_row(state, samplers=ANY_ROW))
            deadline = version + state.config.staleness.max_staleness
            digest = state.policies[version]
            spec = msgspec.structs.replace(spec, version=version, digest=digest, deadline=deadline)
            state.ordinal += 1
            state.counters.dispatched += 1
            admit(state, spec)
            free -= spec.size


def _may_admit_older(state: State, version: int) -> bool:
    """The rule of `staleness`, for a deadline that is not the newest."""
    at = state.standing()
    untaken = sum(state.deadlines.values())
    in_training = at.per_step if at.training else 0
    if untaken + in_training >= in_flight_max(at.in_flight_batches, at.per_step):
        return False
    if untaken >= (at.steps - at.step) * at.per_step:
        return False
    deadline = version + at.max_staleness
    deadlines = dict(state.deadlines)
    deadlines[deadline] = deadlines.get(deadline, 0) + 1
    return feasible(deadlines, at.step, at.per_step)


def _add(state: State, found: list[AnyDecision], decision: AnyDecision) -> None:
    apply_decision(state, decision)
    found.append(decision)
