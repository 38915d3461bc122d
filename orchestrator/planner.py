"""Planner: all decisions as a function of the state.

`_STAGES` run in order; each decision is applied immediately with the functions of the fold. Time
and metrics enter the state as observations, so equal states give equal plans, and `audit` can
recompute them. The cut size influences plans, so a run keeps its first planner's.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from dora_pipe.config.logged import settings_in_force
from dora_pipe.orchestrator import colocated, serving, state_ops
from dora_pipe.orchestrator.apply_decision import (
    apply_decision,
    eval_spec,
    may_cancel,
    next_evaluation,
    next_training_row,
    part_due,
    part_key,
    pinned,
    train_spec,
)
from dora_pipe.orchestrator.colocated import batch_due
from dora_pipe.orchestrator.curriculum import Samplers
from dora_pipe.orchestrator.entities import Group, Worker
from dora_pipe.orchestrator.moving import moves
from dora_pipe.orchestrator.scoring import next_question
from dora_pipe.orchestrator.staleness import admissible, redundant
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.watched import stop_due
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    End,
    EndSamples,
    Fence,
    GroupSpec,
    Migrate,
    SampleOutcome,
    Schedule,
    ScheduledSample,
    ScoreGroup,
    StopRun,
    TakeBatch,
    TakePart,
)
from dora_pipe.schemas.topics import worker_name_error

PLANNER: Final = "consolidate-3"
"""Recorded in `run started`; change it when plans change."""

DECISIONS_MAX: Final = 500
"""Plan size that bounds round time; the rest follows in the next round.

A group's cancels and end, an admitted group's placements, a batch and an evaluation are not split.
"""


@dataclass(slots=True)
class _Scheduling:
    spec: GroupSpec
    worker: Worker
    reason: str
    samples: list[ScheduledSample] = field(default_factory=list)

    def decision(self) -> Schedule:
        return Schedule(
            spec=self.spec,
            worker=self.worker.name,
            incarnation=self.worker.incarnation,
            samples=tuple(self.samples),
            reason=self.reason,
        )


class Draft:
    """Growing plan, applied to the state."""

    def __init__(self, state: State, limit: int, samplers: Samplers | None) -> None:
        self.state = state
        self.limit = limit
        self.samplers = samplers
        self._size = 0
        self._decisions: list[AnyDecision | _Scheduling] = []
        self._schedulings: dict[tuple[str, str], _Scheduling] = {}

    def add(self, decision: AnyDecision) -> None:
        """Add and apply a decision."""
        apply_decision(self.state, decision)
        self._decisions.append(decision)
        self._size += size_of([decision])

    def schedule(self, trajectory: str, worker: Worker, reason: str) -> None:
        """Place a queued request on a worker with room.

        Placements of a group on a worker form one decision, at the position of the first.
        """
        state = self.state
        request = state.requests[trajectory]
        key = (request.group, worker.name)
        scheduling = self._schedulings.get(key)
        if scheduling is None:
            scheduling = _Scheduling(state.groups[request.group].spec, worker, reason)
            self._schedulings[key] = scheduling
            self._decisions.append(scheduling)
        attempt = request.attempt + 1
        sample = ScheduledSample(
            sample=request.sample, attempt=attempt, resume=request.resume, kv=request.kv
        )
        scheduling.samples.append(sample)
        state_ops.schedule(state, trajectory, attempt, worker)
        self._size += 1

    def decisions(self) -> list[AnyDecision]:
        return [
            decision.decision() if isinstance(decision, _Scheduling) else decision
            for decision in self._decisions
        ]

    @property
    def full(self) -> bool:
        """Whether the plan is cut here."""
        return self._size >= self.limit


def decide(
    state: State, *, limit: int | None = None, samplers: Samplers | None = None
) -> list[AnyDecision]:
    """Return the decisions, applied to `state`; clear its trigger unless cut at `limit`.

    Raises ConfigError if `samplers` fail.
    """
    draft = Draft(state, DECISIONS_MAX if limit is None else limit, samplers)
    if state.started is not None and not state.done:
        for stage in _STAGES:
            if not state.failures.halted:
                stage(draft)
    if not draft.full:
        state.trigger = ""
    return draft.decisions()


def may_still_admit(state: State) -> int:
    """Return how many groups may be admitted now."""
    return 0 if state.paused else admissible(state.deadlines, state.standing())


def _fence(draft: Draft) -> None:
    silent = [worker for worker in draft.state.workers.values() if worker.silent]
    for worker in sorted(silent, key=lambda worker: worker.name):
        why = worker_name_error(worker.name) or "nothing heard for a lease"
        draft.add(Fence(worker=worker.name, incarnation=worker.incarnation, reason=why))


def _end_samples(draft: Draft) -> None:
    state = draft.state
    for name, outcome in list(state.redundant.items()):
        if draft.full:
            return
        group = state.groups[name]
        samples = state_ops.missing_samples(group)
        reason = _WHY_LEFT[outcome].format(valid=group.valid, size=group.spec.size)
        _cancel_samples(draft, group, reason)
        draft.add(EndSamples(group=name, samples=samples, outcome=outcome, reason=reason))


_WHY_LEFT: Final[dict[SampleOutcome, str]] = {
    "redundant": "its group has {size} valid trajectories without it",
    "expired": "its group was open for too long; {valid} of {size} are valid",
}


def _end_groups(draft: Draft) -> None:
    state = draft.state
    for name in list(state.ending):
        if draft.full:
            return
        group = state.groups[name]
        assert group.verdict is not None
        _cancel_samples(draft, group, f"its group is {group.verdict.outcome}")
        draft.add(End(group=name, outcome=group.verdict.outcome, reason=group.verdict.why))


def _halt(draft: Draft) -> None:
    if not draft.full and (halt := state_ops.halt_now(draft.state)) is not None:
        draft.add(halt)


def _stop_early(draft: Draft) -> None:
    state = draft.state
    assert state.config is not None
    if not draft.full and (due := stop_due(state.watched, state.config)) is not None:
        draft.add(due)


def _end_redundant(draft: Draft) -> None:
    state = draft.state
    count = redundant(state.deadlines, state.standing())
    if not count and not state.stop_now:
        return
    train = latest(state, min(count, draft.limit))
    for group in [*train, *(_evaluations(state) if state.stop_now else ())]:
        if draft.full:
            return
        _cancel_samples(draft, group, "the run stops")
        draft.add(End(group=group.spec.group, outcome="cancelled", reason="stop: no step is left"))


def latest(state: State, count: int) -> list[Group]:
    """Return groups of U, latest deadline first."""
    generating = state.index.generating
    running = (
        state.groups[name].key
        for deadline in sorted(generating, reverse=True)
        for name in reversed(generating[deadline])
    )
    both = heapq.merge(running, reversed(state.finished), reverse=True)
    return [state.groups[key.group] for key in islice(both, count)]


def _evaluations(state: State) -> list[Group]:
    groups = [group for group in state.groups.values() if group.spec.purpose == "eval"]
    return sorted(
        (group for group in groups if may_cancel(state, group)), key=lambda group: group.key
    )


def _cancel_samples(draft: Draft, group: Group, reason: str) -> None:
    for name in state_ops.open_samples(draft.state, group):
        request = draft.state.requests[name]
        if request.worker:
            draft.add(
                Cancel(
                    trajectory=name,
                    attempt=request.attempt,
                    worker=request.worker,
                    incarnation=request.incarnation,
                    reason=reason,
                )
            )


def _take_batch(draft: Draft) -> None:
    state = draft.state
    assert state.config is not None
    if not state.finished:
        return
    if state.redundant:
        return  # The plan is full.
    standing = state.standing()
    if standing.step >= standing.steps:
        return
    batch = [] if standing.training else batch_due(state)
    if not batch:
        _take_parts(draft)
        return
    if colocated.awaited(state):
        return
    groups = tuple(state.groups[name].taken() for name in batch)
    in_flight = state_ops.in_flight_due(state)
    reason = f"{len(state.finished)} groups finished; the earliest deadlines go first"
    reason += f"; {in_flight:g} batches in flight from now on" if in_flight else ""
    draft.add(
        TakeBatch(
            step=standing.step,
            attempt=state.attempt,
            groups=groups,
            settings=settings_in_force(state.config, standing.step),
            pins=pinned(state),
            parts=tuple(map(len, state.parts)),
            in_flight=in_flight,
            reason=reason,
        )
    )


def _take_parts(draft: Draft) -> None:
    state = draft.state
    assert state.config is not None
    step, attempt = part_key(state)
    while not draft.full and (part := part_due(state)):
        draft.add(
            TakePart(
                step=step,
                attempt=attempt,
                part=len(state.parts),
                groups=tuple(state.groups[name].taken() for name in part),
                settings=settings_in_force(state.config, step),
                reason=f"{len(state.finished)} groups finished; the batch is not whole yet",
            )
        )


def _drain(draft: Draft) -> None:
    asked = [worker for worker in draft.state.workers.values() if worker.drain == "asked"]
    for worker in sorted(asked, key=lambda worker: worker.name):
        draft.add(Drain(worker=worker.name, incarnation=worker.incarnation, reason="a user asked"))


def _send_to_sleep(draft: Draft) -> None:
    state = draft.state
    for worker in [] if draft.full else colocated.to_sleep(state):
        why = f"step {state.version} begins, and {worker.name} shares its GPUs with the trainer"
        _assign_one(draft, worker, NO_VERSION, why)


def _score(draft: Draft) -> None:
    while not draft.full and (question := next_question(draft.state)) is not None:
        draft.add(question)


def _dispatch_evaluation(draft: Draft) -> None:
    state = draft.state
    if state.paused or draft.full:
        return
    while next_evaluation(state) is not None:
        reason = f"evaluation of version {state.version}"
        draft.add(Dispatch(spec=eval_spec(state), reason=reason))


def _assign(draft: Draft) -> None:
    state = draft.state
    if draft.full or not (state.index.idle or state.partial_rollout or state.residents):
        return
    held = colocated.held(state)
    while not draft.full and (orphan := serving.orphan_assignment(state, held)) is not None:
        _assign_one(draft, *orphan)
    for assignment in serving.newest_assignments(state, may_still_admit(state), held):
        if draft.full:
            return
        _assign_one(draft, *assignment)


def _assign_one(draft: Draft, worker: Worker, version: int, reason: str) -> None:
    state = draft.state
    resident = worker.name in state.residents
    draft.add(
        Assign(
            worker=worker.name,
            incarnation=worker.incarnation,
            version=version,
            digest=state.policies.get(version, ""),
            drop=(serving.versions_to_drop(state, worker, version) or ()) if resident else (),
            reason=reason,
        )
    )


def _schedule_released(draft: Draft) -> None:
    for name in sorted(draft.state.released):
        worker = _reserved_worker(draft.state, name)
        if worker is not None and not draft.full:
            draft.schedule(name, worker, f"it moves here, where {worker.name} keeps a slot for it")


def _schedule(draft: Draft) -> None:
    state = draft.state
    if not state.queues:
        return
    spared = serving.victims(state)
    for version in sorted(state.queues):
        for worker in serving.open_workers(state, version, spared):
            if version not in state.queues or draft.full:
                break
            first = state.queues[version][0].trajectory
            draft.schedule(first, worker, f"its turn in the queue of version {version}")


def _reserved_worker(state: State, trajectory: str) -> Worker | None:
    """Return a released request's destination if it still hosts the version."""
    request = state.requests[trajectory]
    assert request.moving is not None
    worker = state.worker_of(*request.moving)
    if worker is None or not worker.usable or worker.pressed:
        return None
    version = state.groups[request.group].spec.version
    return worker if serving.has_version(state, worker, version) else None


def _migrate(draft: Draft) -> None:
    state = draft.state
    asked = state.trigger or serving.orphans(state) or colocated.emptying_before_sleep(state)
    if not asked:
        return
    for name, to, reason in moves(state, may_still_admit(state)):
        if draft.full:
            return
        request = state.requests[name]
        draft.add(
            Migrate(
                trajectory=name,
                attempt=request.attempt,
                worker=request.worker,
                incarnation=request.incarnation,
                to=to.name if to else "",
                to_incarnation=to.incarnation if to else -1,
                reason=reason,
            )
        )


def _admit(draft: Draft) -> None:
    state = draft.state
    hosts = state.index.hosts.get(state.version)
    if hosts is None or state.version in state.queues or draft.full:
        return
    room = may_still_admit(state)
    if not room or serving.orphans(state):
        return
    while (worker := hosts.roomiest()) is not None:
        if state.version not in state.queues:
            if not room or draft.full:
                return
            room -= 1
            reason = f"{worker.load} of {worker.slots} slots of {worker.name} are taken"
            row = next_training_row(state, samplers=draft.samplers)
            spec = train_spec(state, row)
            reason += f", {room} more may follow{row.why}"
            draft.add(Dispatch(spec=spec, reason=reason, skipped=row.skipped))
        draft.schedule(state.queues[state.version][0].trajectory, worker, "its group is admitted")


def _stop(draft: Draft) -> None:
    state = draft.state
    if state.groups or state.version < state.steps or next_evaluation(state) is not None:
        return
    draft.add(StopRun(reason=f"{state.version} steps are committed and no group is open"))


_STAGES: Final = (
    _fence,
    _end_samples,
    _end_groups,
    _halt,
    _stop_early,
    _end_redundant,
    _take_batch,
    _drain,
    _send_to_sleep,
    _score,
    _dispatch_evaluation,
    _schedule_released,
    _assign,
    _schedule,
    _migrate,
    _admit,
    _stop,
)
"""Each stage sees the effects of earlier ones."""


def size_of(decisions: Sequence[AnyDecision]) -> int:
    """Return the size: placements per request, batches per group, scorings per trajectory,
    others 1."""
    size = 0
    for decision in decisions:
        if isinstance(decision, Schedule):
            size += len(decision.samples)
        elif isinstance(decision, TakePart | TakeBatch):
            size += len(decision.groups)
        elif isinstance(decision, ScoreGroup):
            size += len(decision.trajectories)
        else:
            size += 1
    return size


def is_cut(decisions: Sequence[AnyDecision]) -> bool:
    """Report whether the plan may continue in the next round."""
    return len(decisions) > 0 and size_of(decisions) >= DECISIONS_MAX
