"""Decides everything the orchestrator decides, as a function of its state alone.

A plan is made in stages, each on what the ones before it left: fence, end, take the batch, drain,
dispatch a due evaluation, assign, place, admit, stop. Every decision is applied to the state as it
is made, by the function that the fold of the log uses, so the planner has no idea of its own of
what a decision does. `decide` changes the state it is given; `plan` leaves it alone.

What a plan needs to know of time or metrics has entered the state as an observation, and the
configuration in force is part of the state. So equal states give equal plans, and whoever has the
log can make every plan again.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Final

import msgspec

from dora_pipe.orchestrator import hosting
from dora_pipe.orchestrator.rules_decision import apply_decision, may_cancel
from dora_pipe.orchestrator.specs import eval_spec, evaluation_due, train_spec
from dora_pipe.orchestrator.staleness import admissible, surplus, take
from dora_pipe.orchestrator.state import Group, State, Worker, settings_in_force
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    Fence,
    Place,
    PlacedSibling,
    StopRun,
    TakeBatch,
)

DECISIONS_MAX: Final = 1000
"""A plan of this size (`size_of`) stops and goes on in the next round: no round grows too big.

What belongs together is not cut: a group's cancels and end, an admitted group's placements, and
the groups of one evaluation may lead beyond it.
"""


class Draft:
    """The plan so far, applied to the state as it grows."""

    def __init__(self, state: State, limit: int) -> None:
        self.state = state
        self.limit = limit
        self.decisions: list[AnyDecision] = []

    def add(self, decision: AnyDecision) -> None:
        """One more decision; whatever is decided after it sees what it did."""
        apply_decision(self.state, decision)
        self.decisions.append(decision)

    def merged(self) -> list[AnyDecision]:
        """The plan, with what goes to one worker of one group in one `place`, where the first is.

        Placing commutes: nothing between two placements of a plan asks for their order.
        """
        found: list[AnyDecision] = []
        at: dict[tuple[str, str, str], int] = {}
        for one in self.decisions:
            if not isinstance(one, Place):
                found.append(one)
                continue
            key = (one.spec.group, one.worker, one.reason)
            if (first := at.setdefault(key, len(found))) == len(found):
                found.append(one)
                continue
            place = found[first]
            assert isinstance(place, Place)
            siblings = place.siblings + one.siblings
            found[first] = msgspec.structs.replace(place, siblings=siblings)
        return found

    @property
    def full(self) -> bool:
        """Whether the rest of the plan is left to the next round."""
        return len(self.decisions) >= self.limit


def size_of(decisions: Sequence[AnyDecision]) -> int:
    """Decisions, those that place several requests counted once for each."""
    return sum(len(one.siblings) if isinstance(one, Place) else 1 for one in decisions)


def plan(state: State, *, limit: int = DECISIONS_MAX) -> tuple[AnyDecision, ...]:
    """What to decide now; the state is left as it is. `plan(state with plan applied) == ()`."""
    return tuple(decide(copy.deepcopy(state), limit=limit))


def decide(state: State, *, limit: int = DECISIONS_MAX) -> list[AnyDecision]:
    """What to decide now, already applied to `state`."""
    draft = Draft(state, limit)
    if state.facts is None or state.done:
        return draft.merged()
    _fence(draft)
    _end_groups(draft)
    _end_surplus(draft)
    _take_batch(draft)
    _drain(draft)
    _dispatch_evaluation(draft)
    _assign(draft)
    _place(draft)
    _admit(draft)
    _stop(draft)
    return draft.merged()


def may_still_admit(state: State) -> int:
    """Groups that the bound, the cap, the end of the run and a pause leave room for."""
    if state.paused:
        return 0
    return admissible(state.deadlines, state.standing())


def _fence(draft: Draft) -> None:
    for worker in _by_name(draft.state):
        if worker.silent:
            draft.add(
                Fence(worker=worker.name, epoch=worker.epoch, reason="nothing heard for a lease")
            )


def _end_groups(draft: Draft) -> None:
    state = draft.state
    for name in list(state.ending):
        if draft.full:
            return
        group = state.groups[name]
        assert group.verdict is not None
        _cancel_siblings(draft, group, f"its group is {group.verdict.fate}")
        draft.add(End(group=name, fate=group.verdict.fate, reason=group.verdict.why))


def _end_surplus(draft: Draft) -> None:
    """Groups that no step is left for: those of the latest deadlines; late stop."""
    state = draft.state
    count = surplus(state.deadlines, state.standing())
    if not count and not state.stop_now:
        return
    open_ = [group for group in state.groups.values() if may_cancel(state, group)]
    train = sorted((one for one in open_ if one.spec.purpose == "train"), key=lambda one: one.key)
    evals = [one for one in open_ if one.spec.purpose == "eval"]
    for group in [*train[::-1][:count], *evals]:
        if draft.full:
            return
        _cancel_siblings(draft, group, "the run stops")
        draft.add(End(group=group.spec.group, fate="cancelled", reason="stop: no step is left"))


def _cancel_siblings(draft: Draft, group: Group, reason: str) -> None:
    """Take the running siblings of a group off their workers."""
    for sibling in range(group.spec.size):
        name = trajectory_id(group.spec.group, sibling)
        request = draft.state.requests.get(name)
        if request is not None and request.worker:
            draft.add(
                Cancel(
                    trajectory=name,
                    attempt=request.attempt,
                    worker=request.worker,
                    epoch=request.epoch,
                    reason=reason,
                )
            )


def _take_batch(draft: Draft) -> None:
    state = draft.state
    assert state.config is not None
    at = state.standing()
    if at.training or at.step >= at.steps:
        return
    batch = take(state.finished, state.deadlines, step=at.step, per_step=at.per_step)
    if not batch:
        return
    groups = tuple(state.groups[one.group].taken() for one in batch)
    draft.add(
        TakeBatch(
            step=at.step,
            attempt=state.attempt,
            groups=groups,
            settings=settings_in_force(state.config),
            reason=f"{len(state.finished)} groups finished; the earliest deadlines go first",
        )
    )


def _drain(draft: Draft) -> None:
    for worker in _by_name(draft.state):
        if worker.drain == "asked":
            draft.add(Drain(worker=worker.name, epoch=worker.epoch, reason="a user asked"))


def _dispatch_evaluation(draft: Draft) -> None:
    """All groups of a due evaluation at once; they queue behind the training groups of t."""
    state = draft.state
    if state.paused or draft.full:
        return
    while evaluation_due(state):
        draft.add(Dispatch(spec=eval_spec(state), reason=f"evaluation of version {state.version}"))


def _assign(draft: Draft) -> None:
    state = draft.state
    while hosting.any_idle(state) and not draft.full:
        found = hosting.next_assignment(state, may_still_admit(state))
        if found is None:
            return
        worker, version, reason = found
        draft.add(
            Assign(
                worker=worker.name,
                epoch=worker.epoch,
                version=version,
                digest=state.policies[version],
                reason=reason,
            )
        )


def _place(draft: Draft) -> None:
    state = draft.state
    for version, workers in hosting.placements(state):
        for worker in workers:
            if version not in state.queues or draft.full:
                break
            _place_first(draft, version, worker, "its turn in the queue of its version")


def _admit(draft: Draft) -> None:
    """New groups, while a slot is free for one; their other siblings queue."""
    state = draft.state
    room = may_still_admit(state)
    if not room or state.version in state.queues:
        return
    hosted = hosting.hosts(state)
    if hosting.orphans(state, hosted):
        return
    workers = hosting.spread(iter(hosted.get(state.version, ())))
    for worker in workers:
        if state.version not in state.queues:
            if not room or draft.full:
                return
            room -= 1
            draft.add(Dispatch(spec=train_spec(state), reason=f"a slot is free on {worker.name}"))
        _place_first(draft, state.version, worker, "its group is admitted")


def _place_first(draft: Draft, version: int, worker: Worker, reason: str) -> None:
    """Place the request that is first in the queue of a version."""
    state = draft.state
    key = state.queues[version][0]
    request = state.requests[key.trajectory]
    draft.add(
        Place(
            spec=state.groups[request.group].spec,
            worker=worker.name,
            epoch=worker.epoch,
            siblings=(
                PlacedSibling(
                    sibling=request.sibling,
                    attempt=request.attempt + 1,
                    resume=request.resume,
                    kv=request.kv,
                ),
            ),
            reason=reason,
        )
    )


def _stop(draft: Draft) -> None:
    state = draft.state
    if state.groups or state.version < state.steps or evaluation_due(state):
        return
    draft.add(StopRun(reason=f"{state.version} steps are committed and no group is open"))


def _by_name(state: State) -> list[Worker]:
    return [state.workers[name] for name in sorted(state.workers)]
