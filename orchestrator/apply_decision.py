"""Effects and legality of decisions, shared by planner and fold.

An illegal decision raises InvariantBroken and changes nothing: the planner has a bug, or the log
was changed.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any, Final

import msgspec

from dora_pipe.config.batches import why_no_parts
from dora_pipe.config.model import Evaluation, Task
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.orchestrator import colocated, scoring, serving, watched
from dora_pipe.orchestrator.colocated import batch_due
from dora_pipe.orchestrator.curriculum import (
    NextRow,
    Samplers,
    evaluation_group,
    evaluation_rows,
    next_row,
)
from dora_pipe.orchestrator.entities import UNTAKEN, Group, Request, Training, Verdict, Worker
from dora_pipe.orchestrator.rows import Curriculum
from dora_pipe.orchestrator.serving import may_be_interrupted
from dora_pipe.orchestrator.staleness import may_admit, next_part, redundant
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.state_ops import (
    admit,
    aim,
    assign,
    close_worker,
    drop,
    end_parts,
    forget,
    give_up_parts,
    halt_now,
    in_flight_after,
    in_flight_due,
    missing_samples,
    note_failure,
    open_samples,
    schedule,
    set_ending,
    take_group,
    take_part,
)
from dora_pipe.schemas.batch import lines_digest
from dora_pipe.schemas.control import DataSet, TakenGroup
from dora_pipe.schemas.identity import (
    group_id,
    group_seed,
    next_task,
    partition_of,
    source_of,
    trajectory_id,
    whole_shares,
)
from dora_pipe.schemas.rounds import (
    NO_VERSION,
    AnyDecision,
    Assign,
    Cancel,
    Dispatch,
    Drain,
    EarlyStop,
    End,
    EndSamples,
    Fence,
    GroupSpec,
    Halt,
    Migrate,
    Schedule,
    ScheduledSample,
    ScoreGroup,
    StopRun,
    TakeBatch,
    TakePart,
)


def apply_decision(state: State, decision: AnyDecision) -> None:
    """Fold one decision. Raises InvariantBroken, changing nothing, if it is illegal."""
    under_way = state.started is not None and not state.done and not state.failures.halted
    _require(under_way, "the run has not started or has ended")
    _APPLY[type(decision)](state, decision)


def _dispatch(state: State, decision: Dispatch) -> None:
    spec = decision.spec
    _require(not state.paused, f"{spec.group}: the run is paused")
    if spec.purpose == "train":
        _dispatch_train(state, decision)
    else:
        _dispatch_row(state, spec)
    admit(state, spec)


def _dispatch_train(state: State, decision: Dispatch) -> None:
    spec = decision.spec
    row = next_training_row(state, chosen=spec.index)
    data = train_data(state, spec.task)
    _require(0 <= row.index < data.rows, f"{spec.group} names an unknown row")
    _require(spec == train_spec(state, row), f"{spec.group} is not the next group")
    _require(decision.skipped == row.skipped, f"{spec.group} skips unexpected rows")
    _require(may_admit(state.deadlines, state.standing()), f"{spec.group} violates C3")
    if decision.skipped:
        curriculum = state.curricula.setdefault(spec.source, Curriculum())
        curriculum.passed += len(decision.skipped)
    state.ordinal += 1
    state.drawn[spec.task] = state.drawn.get(spec.task, 0) + 1


def _dispatch_row(state: State, spec: GroupSpec) -> None:
    due = next_evaluation(state)
    if due is None:
        raise InvariantBroken(f"{spec.group}: no evaluation is due")
    _require(spec == eval_spec(state), f"{spec.group} is not the next group")
    if state.eval_row == 0 and _is_watched(state, spec):
        state.watched = watched.begun(state.watched, spec.version)
    state.eval_ordinal += 1
    state.eval_row += 1
    if state.eval_row == _rows(state, due):
        state.eval_row = 0
        state.evaluations[spec.evaluation] = state.version


def _is_watched(state: State, spec: GroupSpec) -> bool:
    assert state.config is not None
    evaluation = watched.watched_evaluation(state.config)
    return spec.purpose == "eval" and evaluation is not None and evaluation.name == spec.evaluation


def _schedule(state: State, decision: Schedule) -> None:
    spec = decision.spec
    group = _group(state, spec.group)
    worker = _worker(state, decision.worker, decision.incarnation)
    if group.phase == "ending" or spec.group in state.redundant:
        raise InvariantBroken(f"{spec.group} is a group that ends, or waits for no trajectory")
    if spec != group.spec:
        raise InvariantBroken(f"{spec.group} is dispatched otherwise")
    resident = worker.name in state.residents
    if not worker.usable or (worker.loading and not resident):
        raise InvariantBroken(f"{worker.name} accepts no requests")
    has = serving.has_version(state, worker, spec.version)
    if not (has if resident else state.may_run(spec, worker.target)):
        raise InvariantBroken(f"{worker.name} hosts another version (C1)")
    if not decision.samples:
        raise InvariantBroken("a placement without trajectories")
    names = [trajectory_id(spec.group, sample.sample) for sample in decision.samples]
    if len(set(names)) != len(names):
        raise InvariantBroken(f"a trajectory of {spec.group} is placed twice")
    both = zip(names, decision.samples, strict=True)
    expected = sum(_check_scheduled(state, name, sample, worker) for name, sample in both)
    more = len(names) - expected  # Reserved slots remain reserved.
    if more and worker.room < more:
        raise InvariantBroken(f"{worker.name} is full")
    for name, sample in zip(names, decision.samples, strict=True):
        schedule(state, name, sample.attempt, worker)


def _check_scheduled(state: State, name: str, sample: ScheduledSample, worker: Worker) -> bool:
    request = _request(state, name)
    if request.worker:
        raise InvariantBroken(f"{name} is already placed")
    if sample.attempt != request.attempt + 1:
        raise InvariantBroken(f"{name}: not the next attempt")
    if sample.resume != request.resume:
        raise InvariantBroken(f"{name} has other progress")
    if sample.kv != request.kv:
        raise InvariantBroken(f"{name} has another KV cache")
    return request.moving == (worker.name, worker.incarnation)


def _migrate(state: State, decision: Migrate) -> None:
    name = decision.trajectory
    request = _placed(state, decision)
    group = state.groups[request.group]
    _require(request.moving is None, f"{name} is already moving")
    _require(group.phase != "ending", f"{name} is of a group that ends")
    _require(request.group not in state.redundant, f"{name} is redundant")
    source = state.workers[request.worker]
    if not decision.to:
        sleeps = source.target == NO_VERSION and source.moves
        _require(sleeps, f"{source.name} does not go to sleep, or has no movable requests")
        aim(state, name, None)
        return
    to = _worker(state, decision.to, decision.to_incarnation)
    _require(to is not source, f"{name} is already on {to.name}")
    _require(to.usable and not to.loading, f"{to.name} accepts no requests")
    has = serving.has_version(state, to, group.spec.version)
    _require(has, f"{to.name} hosts another version (C1)")
    _require(to.room > 0, f"{to.name} is full")
    _require(to.moves and source.moves, f"{name} is on a worker without moves")
    aim(state, name, to)


def _cancel(state: State, decision: Cancel) -> None:
    _placed(state, decision)
    drop(state, decision.trajectory)


def _placed(state: State, decision: Cancel | Migrate) -> Request:
    request = _request(state, decision.trajectory)
    scheduled = (decision.attempt, decision.worker, decision.incarnation)
    current = (request.attempt, request.worker, request.incarnation)
    _require(current == scheduled, f"{decision.trajectory} is not placed on that worker")
    return request


def _assign(state: State, decision: Assign) -> None:
    worker = _worker(state, decision.worker, decision.incarnation)
    _require(worker.usable, f"{worker.name} accepts no version")
    _require(not worker.loading, f"{worker.name} is loading")
    why = colocated.assign_error(state, worker, decision)
    _require(not why, why)
    if decision.version == NO_VERSION:
        assign(state, worker, NO_VERSION, "")
        return
    goes_on = state.partial_rollout and may_be_interrupted(state, worker)
    goes_on = goes_on and decision.version > worker.target
    goes_on = goes_on or worker.name in state.residents
    _require(not worker.requests or goes_on, f"{worker.name} has open requests")
    _require(not worker.arriving, f"{worker.name} is the target of moves")
    _require(worker.target != decision.version, f"{worker.name} already has that version")
    digest = state.policies.get(decision.version)
    _require(digest == decision.digest, f"version {decision.version} is not that policy")
    why = serving.assign_error(state, worker, decision.version, decision.drop)
    _require(not why, why)
    assign(state, worker, decision.version, decision.digest, decision.drop)


def _drain(state: State, decision: Drain) -> None:
    worker = _worker(state, decision.worker, decision.incarnation)
    _require(worker.drain == "asked", f"{worker.name} has no drain request")
    worker.drain = "told"
    state.touch(worker)


def _fence(state: State, decision: Fence) -> None:
    worker = _worker(state, decision.worker, decision.incarnation)
    _require(worker.silent, f"the lease of {worker.name} has not expired")
    close_worker(state, worker, orderly=False)


def _score_group(state: State, decision: ScoreGroup) -> None:
    name = decision.spec.group
    group, worker = _group(state, name), _worker(state, decision.worker, decision.incarnation)
    waits = name in state.scoring and not state.scoring[name].worker
    _require(waits, f"{name} is not waiting for its score")
    _require(worker.usable, f"{worker.name} accepts no work")
    due = scoring.question(state, group, worker)
    same = msgspec.structs.replace(due, reason=decision.reason) == decision
    _require(same, f"{name} has other trajectories, or this is not the next attempt")
    asked = sum(scoring.by(worker) for scoring in state.scoring.values())
    _require(asked < scoring.GROUPS_MAX, f"{worker.name} scores {asked} groups already")
    state.scoring[name].attempt += 1
    state.scoring[name].worker = worker.name
    state.scoring[name].incarnation = worker.incarnation


def _take_part(state: State, decision: TakePart) -> None:
    _require(
        (decision.step, decision.attempt) == part_key(state),
        f"part {decision.part} of {(decision.step, decision.attempt)} is not the next one",
    )
    _require(decision.step < state.steps, f"the run has no step {decision.step}")
    _require(decision.part == len(state.parts), f"{len(state.parts)} is the next part")
    same = [group.group for group in decision.groups] == part_due(state)
    _require(same and bool(decision.groups), "not the next part by deadline (C3)")
    for taken in decision.groups:
        _as_finished(state, taken)
    take_part(state, [group.group for group in decision.groups])


def part_key(state: State) -> tuple[int, int]:
    """Return (step, attempt) of the next part."""
    standing = state.standing()
    return standing.step, 1 if standing.training else state.attempt


def part_due(state: State) -> list[str]:
    """Return the next part's groups; empty if none is due.

    During training only a first part may be taken: taking too early displaces groups that end
    later.
    """
    standing, size = state.standing(), part_size(state)
    if not size:
        return []
    part = next_part(
        state.finished,
        state.deadlines,
        step=standing.step,
        per_step=standing.per_step,
        taken=len(state.in_parts),
        size=size,
    )
    return [group.group for group in part]


def part_size(state: State) -> int:
    """Return the next part's size; 0 if the batch itself is next."""
    config = state.config
    assert config is not None
    if state.index.colocated:
        return 0  # Colocated workers would sleep from the first part on.
    most = config.trainer.batch_parts - 1
    most = most if state.training is None else min(1, most)
    if len(state.parts) >= most or why_no_parts(config):
        return 0
    size = max(1, config.rollout.prompts_per_step // config.trainer.batch_parts)
    return size if len(state.in_parts) + size < config.rollout.prompts_per_step else 0


def _take_batch(state: State, decision: TakeBatch) -> None:
    _of_next_step(state, decision)
    _require(bool(decision.groups), "a batch without groups")
    _require(not colocated.awaited(state), "colocated workers are still awake")
    same = [group.group for group in decision.groups] == batch_due(state)
    _require(same, "not the next batch by deadline (C3)")
    _require(decision.parts == tuple(map(len, state.parts)), "the batch has other parts")
    _require(decision.pins == pinned(state), "the batch pins other versions")
    _require(decision.in_flight == in_flight_due(state), "unexpected in-flight limit")
    for taken in decision.groups:
        _as_finished(state, taken)
    state.in_flight = in_flight_after(state) or state.in_flight
    held = len(state.in_parts)
    end_parts(state)
    for group in decision.groups[held:]:
        take_group(state, state.groups[group.group])
    in_order = sorted(decision.groups, key=attrgetter("group"))
    state.training = Training(
        step=decision.step,
        attempt=decision.attempt,
        digest=lines_digest(state.leaves.batch_lines(group) for group in in_order),
        groups=tuple(group.group for group in decision.groups),
    )


def _of_next_step(state: State, decision: TakeBatch) -> None:
    key = (decision.step, decision.attempt)
    _require(state.training is None, f"step {state.version} is training")
    _require(key == (state.version, state.attempt), f"batch {key} is not the next one")
    _require(decision.step < state.steps, f"the run has no step {decision.step}")


def _as_finished(state: State, taken: TakenGroup) -> None:
    group = _group(state, taken.group)
    _require(group.taken() == taken, f"{taken.group} has other trajectories")
    _require(taken.group not in state.redundant, f"{taken.group} has trajectories left")


def _end(state: State, decision: End) -> None:
    group = _group(state, decision.group)
    samples = _not_running(state, group)
    if decision.outcome == "cancelled" and group.verdict is None:
        _require(may_cancel(state, group), f"{decision.group} is not redundant")
        set_ending(state, group, Verdict(outcome="cancelled", why=decision.reason))
    outcome = group.verdict.outcome if group.verdict is not None else None
    _require(decision.outcome == outcome, f"{decision.group} is not {decision.outcome}")
    for name in samples:
        drop(state, name)
    state.ending.remove(decision.group)
    forget(state, group)
    state.counters.outcomes[decision.outcome] = state.counters.outcomes.get(decision.outcome, 0) + 1
    if decision.outcome == "failed":
        note_failure(state, group)
    elif decision.outcome == "evaluated" and state.watched and _is_watched(state, group.spec):
        _note_evaluated(state, state.watched, group)


def _not_running(state: State, group: Group) -> list[str]:
    samples = open_samples(state, group)
    running = [name for name in samples if state.requests[name].worker]
    _require(not running, f"{running[:1]} is running and was not cancelled")
    return samples


def _end_samples(state: State, decision: EndSamples) -> None:
    group = _group(state, decision.group)
    outcome = state.redundant.get(decision.group)
    _require(
        decision.outcome == outcome, f"trajectories of {decision.group} are not {decision.outcome}"
    )
    same = decision.samples == missing_samples(group)
    _require(same, f"{decision.group} has other trajectories left")
    del state.redundant[decision.group]
    for name in _not_running(state, group):
        drop(state, name)


def _note_evaluated(state: State, before: watched.Watched, group: Group) -> None:
    assert state.config is not None
    evaluation = watched.watched_evaluation(state.config)
    assert evaluation is not None
    groups = _rows(state, evaluation)
    state.watched = watched.ended(before, group.spec.version, group.rewards, groups=groups)


def may_cancel(state: State, group: Group) -> bool:
    """Report whether a stop leaves no step for this group."""
    if group.phase not in UNTAKEN:
        return False
    if group.spec.purpose == "eval":
        return state.stop_now
    return redundant(state.deadlines, state.standing()) > 0


def _stop_run(state: State, decision: StopRun) -> None:
    _require(not state.groups, f"{len(state.groups)} groups are open")
    _require(state.version >= state.steps, f"step {state.version} is left")
    state.done = True


def _early_stop(state: State, decision: EarlyStop) -> None:
    assert state.config is not None
    due = watched.stop_due(state.watched, state.config)
    _require(due == decision, "the evaluation has another wait, or is another one")
    assert state.watched is not None
    state.watched = msgspec.structs.replace(state.watched, stopped=True)
    stop_soon(state)


def stop_soon(state: State) -> None:
    """End the run when the groups in flight are trained."""
    standing = state.standing()
    state.stop_at = min(
        standing.steps, standing.step + sum(state.deadlines.values()) // standing.per_step
    )
    if state.stop_at <= standing.step:
        give_up_parts(state)


def _halt(state: State, decision: Halt) -> None:
    due = halt_now(state)
    same = due is not None and (due.error, due.trajectory) == (decision.error, decision.trajectory)
    _require(same, "fewer groups have failed, or others")
    state.failures = msgspec.structs.replace(state.failures, halted=decision.reason)


def _request(state: State, trajectory: str) -> Request:
    request = state.requests.get(trajectory)
    if request is None:
        raise InvariantBroken(f"{trajectory} is not open")
    return request


def _group(state: State, name: str) -> Group:
    group = state.groups.get(name)
    if group is None:
        raise InvariantBroken(f"{name} is not open")
    return group


def _worker(state: State, name: str, incarnation: int) -> Worker:
    worker = state.worker_of(name, incarnation)
    if worker is None:
        raise InvariantBroken(f"{name} of incarnation {incarnation} is not there")
    return worker


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantBroken(otherwise)


_APPLY: Final[dict[type[Any], Callable[[State, Any], None]]] = {
    Dispatch: _dispatch,
    Schedule: _schedule,
    Migrate: _migrate,
    Cancel: _cancel,
    Assign: _assign,
    Drain: _drain,
    Fence: _fence,
    ScoreGroup: _score_group,
    TakePart: _take_part,
    TakeBatch: _take_batch,
    End: _end,
    EndSamples: _end_samples,
    StopRun: _stop_run,
    Halt: _halt,
    EarlyStop: _early_stop,
}


def pinned(state: State) -> tuple[int, ...]:
    """Return versions the store must keep."""
    workers = state.workers.values()
    held = {worker.target for worker in workers} | {worker.served for worker in workers}
    held.update(version for residence in state.residents.values() for version in residence.held)
    if state.config is not None:
        held |= watched.kept(state.watched, state.config)
    return tuple(sorted(version for version in held | state.pins.keys() if version >= 0))


def next_training_row(
    state: State, *, samplers: Samplers | None = None, chosen: int | None = None
) -> NextRow:
    """Return the row of the next training group."""
    task = _next_task(state)
    rows = train_data(state, task.name).rows
    return next_row(state, task, rows, samplers=samplers, chosen=chosen)


def train_data(state: State, task: str) -> DataSet:
    data = None if state.started is None else state.started.data(source_of("train", task))
    assert data is not None, "the run has not started with this task"
    return data


def train_spec(state: State, row: NextRow) -> GroupSpec:
    """Return the next training group."""
    assert state.started is not None and state.config is not None
    ordinal, task = state.ordinal, _next_task(state).name
    return GroupSpec(
        group=group_id("train", ordinal),
        ordinal=ordinal,
        purpose="train",
        version=state.version,
        digest=state.policies[state.version],
        deadline=state.standing().deadline,
        partition=partition_of(ordinal, state.config.bus.partitions),
        dataset_digest=train_data(state, task).digest,
        index=row.index,
        data_epoch=row.data_epoch,
        seed=group_seed(state.started.seed, "train", ordinal),
        size=state.config.rollout.group_size,
        task=task,
        redundancy=state.config.rollout.group_redundancy,
    )


def _next_task(state: State) -> Task:
    assert state.config is not None
    tasks = state.config.tasks
    if len(tasks) == 1:
        return tasks[0]
    shares = whole_shares(tuple([task.ratio for task in tasks]))
    return tasks[next_task(shares, [state.drawn.get(task.name, 0) for task in tasks])]


def eval_spec(state: State) -> GroupSpec:
    """Return the next evaluation group."""
    assert state.started is not None and state.config is not None
    due = next_evaluation(state)
    assert due is not None
    return evaluation_group(
        state.started,
        state.config,
        due,
        state.eval_row,
        ordinal=state.eval_ordinal,
        version=state.version,
        digest=state.policies[state.version],
    )


def _rows(state: State, evaluation: Evaluation) -> int:
    assert state.started is not None
    return evaluation_rows(state.started, evaluation)


def next_evaluation(state: State) -> Evaluation | None:
    """Return the first evaluation with undispatched groups."""
    assert state.config is not None
    if state.stop_now:
        return None
    ends = state.version in (0, state.steps)
    for evaluation in state.config.evaluations:
        done = state.evaluations.get(evaluation.name, -1)
        due = ends or (evaluation.every > 0 and state.version % evaluation.every == 0)
        if due and state.version > done and _rows(state, evaluation):
            return evaluation
    return None
