"""State changes shared by records and decisions. Callers check legality; each function keeps
indexes and leaves in sync."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from dora_pipe.config.model import Rollout, async_batches
from dora_pipe.orchestrator import curriculum
from dora_pipe.orchestrator.entities import (
    KV_PRESSURE,
    UNTAKEN,
    Group,
    Request,
    Residence,
    Result,
    Scoring,
    Training,
    Verdict,
    Worker,
)
from dora_pipe.orchestrator.failures import Failures, ended, halt_due, note
from dora_pipe.orchestrator.in_flight import InFlight
from dora_pipe.orchestrator.index import pull, push, queue_key
from dora_pipe.orchestrator.scoring import is_due
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import NO_VERSION, GroupSpec, Halt, SampleOutcome


def admit(state: State, spec: GroupSpec) -> None:
    """Open a dispatched group and queue its trajectories; a training group enters U."""
    state.groups[spec.group] = Group(spec=spec, results=[None] * spec.samples)
    state.leaves.touch("group", spec.group)
    state.pins[spec.version] = state.pins.get(spec.version, 0) + 1
    if spec.purpose == "train":
        _count(state, spec.deadline, 1)
        state.index.begin(spec)
    for sample in range(spec.samples):
        trajectory = trajectory_id(spec.group, sample)
        state.requests[trajectory] = Request(group=spec.group, sample=sample)
        state.leaves.touch("request", trajectory)
        push(state.queues, state.queue_of(spec), queue_key(spec, sample))


def schedule(state: State, trajectory: str, attempt: int, worker: Worker) -> None:
    """Place a queued request."""
    request = state.requests[trajectory]
    spec = state.groups[request.group].spec
    pull(state.queues, state.queue_of(spec), queue_key(spec, request.sample))
    _unaim(state, trajectory, request)
    request.attempt = attempt
    request.worker, request.incarnation = worker.name, worker.incarnation
    request.kv = None
    if request.began_ns < 0:
        request.began_ns = state.now_ns
    worker.requests.add(trajectory)
    state.leaves.touch("request", trajectory)
    state.touch(worker)


def aim(state: State, trajectory: str, to: Worker | None) -> None:
    """Start a move; `to` reserves a slot. Without `to` the move is not counted."""
    request = state.requests[trajectory]
    worker = state.workers[request.worker]
    request.moving = ANYWHERE if to is None else (to.name, to.incarnation)
    request.moved_ns = state.now_ns
    worker.leaving += 1
    state.leaves.touch("request", trajectory)
    state.touch(worker)
    if to is not None:
        request.moves += 1
        to.arriving += 1
        state.touch(to)


ANYWHERE: Final = ("", -1)
"""`Request.moving` without a destination."""


def requeue(state: State, trajectory: str) -> None:
    """Queue a placed request again."""
    request = state.requests[trajectory]
    _unschedule(state, trajectory, request)
    spec = state.groups[request.group].spec
    push(state.queues, state.queue_of(spec), queue_key(spec, request.sample))


def release(state: State, trajectory: str, kv: Blob | None) -> None:
    """Queue a released request; keep its slot reserved."""
    request = state.requests[trajectory]
    moving = request.moving
    if moving is not None:
        state.seen.released(state.now_ns - request.moved_ns)
    _take_off(state, trajectory, request)
    spec = state.groups[request.group].spec
    push(state.queues, state.queue_of(spec), queue_key(spec, request.sample))
    request.kv = kv
    if moving is None:
        return
    state.released[trajectory] = None
    to = state.worker_of(*moving)
    if moving == ANYWHERE or (to is not None and to.target == NO_VERSION):
        _unaim(state, trajectory, request)


def note_progress(state: State, trajectory: str, resume: Resume) -> None:
    """Store progress unless newer progress is known."""
    request = state.requests[trajectory]
    if request.resume is None or resume.tokens > request.resume.tokens:
        request.resume = resume
        state.leaves.touch("request", trajectory)


def fault(state: State, trajectory: str, error: str) -> None:
    """Requeue after a failed placement, or fail after the last attempt."""
    assert state.config is not None
    request = state.requests[trajectory]
    request.faults += 1
    state.leaves.touch("request", trajectory)
    if request.faults < state.config.rollout.max_attempts or request.group in state.redundant:
        requeue(state, trajectory)
    else:
        fail_sample(state, trajectory, error)


def fail_sample(state: State, trajectory: str, error: str) -> None:
    """End a trajectory as failed."""
    end_sample(state, trajectory, Result(taken=None, reward=None), error=error)


def end_sample(state: State, trajectory: str, result: Result, *, error: str) -> None:
    """End a placed request with its result; `error` explains an invalid one."""
    assert state.config is not None
    request = state.requests.pop(trajectory)
    if result.taken is not None:
        state.seen.lived(state.now_ns - request.began_ns)
    _unschedule(state, trajectory, request)
    group = state.groups[request.group]
    state.leaves.touch("group", request.group)
    assert group.results[request.sample] is None
    group.results[request.sample] = result
    group.ended += 1
    group.valid += result.reward is not None
    if group.phase == "generating":
        _settle(state, group, error=error, trajectory=trajectory)
        if group.phase != "generating":
            _mark_redundant(state, group, "redundant")


TIME_OVER: Final = "GroupExpired: it was open for longer than rollout.group_timeout_s"


def expire(state: State, group: Group) -> None:
    """Stop waiting for a generating group."""
    state.leaves.touch("group", group.spec.group)
    name = trajectory_id(group.spec.group, missing_samples(group)[0])
    _settle(state, group, error=TIME_OVER, trajectory=name, over=True)
    _mark_redundant(state, group, "expired")


def _mark_redundant(state: State, group: Group, outcome: SampleOutcome) -> None:
    failed = group.verdict is not None and group.verdict.outcome == "failed"
    if group.ended < group.spec.samples and not (failed and outcome == "redundant"):
        state.redundant[group.spec.group] = outcome


def missing_samples(group: Group) -> tuple[int, ...]:
    """Return the sample indexes without a result."""
    return tuple(sample for sample, result in enumerate(group.results) if result is None)


def open_samples(state: State, group: Group) -> list[str]:
    """Return ids of a group's open requests."""
    names = (trajectory_id(group.spec.group, sample) for sample in range(group.spec.samples))
    return [name for name in names if name in state.requests]


def _settle(
    state: State, group: Group, *, error: str = "", trajectory: str = "", over: bool = False
) -> None:
    """Update a group after a trajectory ended, scoring finished, or (`over`) waiting ended."""
    assert state.config is not None
    verdict = outcome_of(group, state.config.rollout, over=over)
    if verdict is not None and verdict.outcome != "failed" and is_due(state, group):
        group.phase = "scoring"
        state.scoring[group.spec.group] = Scoring()
        return
    if verdict is not None and verdict.outcome in ("trained", "filtered"):
        curriculum.note_ended(state, group)
    if verdict is COMPLETE:
        group.phase = "finished"
        state.leaves.complete(group.taken())
        state.index.end(group.spec)
        insort(state.finished, group.key)
    elif verdict is not None:
        if verdict.outcome == "failed":
            verdict = Verdict(outcome="failed", why=verdict.why, error=error, trajectory=trajectory)
        set_ending(state, group, verdict)


def end_scoring(state: State, group: Group, rewards: Mapping[str, float]) -> None:
    """Store rewards by trajectory and settle the group."""
    del state.scoring[group.spec.group]
    state.leaves.touch("group", group.spec.group)
    for sample, result in enumerate(group.results):
        if result is not None and result.taken is not None and result.reward is not None:
            reward = rewards[result.taken.trajectory]
            group.results[sample] = msgspec.structs.replace(result, reward=reward, scored=True)
    _settle(state, group)


def fault_scoring(state: State, group: Group, error: str, *, retryable: bool) -> None:
    """Retry scoring, or fail it after the last attempt."""
    assert state.config is not None
    scoring = state.scoring[group.spec.group]
    scoring.faults += 1
    scoring.worker, scoring.incarnation = "", -1
    if not retryable or scoring.faults >= state.config.rollout.max_attempts:
        _fail_scoring(state, group, error)


def _fail_scoring(state: State, group: Group, error: str) -> None:
    del state.scoring[group.spec.group]
    state.leaves.touch("group", group.spec.group)
    group.results = [result and Result(taken=result.taken, reward=None) for result in group.results]
    group.valid = 0
    _settle(state, group, error=error, trajectory=trajectory_id(group.spec.group, 0))


def drop(state: State, trajectory: str) -> None:
    """Drop an unneeded request."""
    request = state.requests.pop(trajectory)
    if request.worker:
        _unschedule(state, trajectory, request)
        return
    _unaim(state, trajectory, request)
    spec = state.groups[request.group].spec
    pull(state.queues, state.queue_of(spec), queue_key(spec, request.sample))


def join_worker(state: State, worker: Worker, *, versions: int = 1) -> None:
    """Add an incarnation that hosts up to `versions` versions."""
    state.workers[worker.name] = worker
    if versions > 1:
        state.residents[worker.name] = Residence(most=versions)
    state.touch(worker)
    state.trigger = f"{worker.name} joined"


def assign(
    state: State, worker: Worker, version: int, digest: str, drop: tuple[int, ...] = ()
) -> None:
    """Assign a version to a worker; no reserved slots remain if it is to sleep."""
    worker.target, worker.digest, worker.target_ns = version, digest, state.now_ns
    for dropped in drop:
        state.residents[worker.name].held.remove(dropped)
    if version == NO_VERSION:
        here = (worker.name, worker.incarnation)
        for name in [
            released for released in state.released if state.requests[released].moving == here
        ]:
            _unaim(state, name, state.requests[name])
    state.touch(worker)


def ready(state: State, worker: Worker, load_ns: int) -> None:
    """Record that a worker has its target."""
    worker.served, worker.load_ns = worker.target, load_ns
    residence = state.residents.get(worker.name)
    if residence is not None and worker.served not in residence.held:
        insort(residence.held, worker.served)
    state.touch(worker)
    state.trigger = f"{worker.name} is ready"


def press(state: State, worker: Worker, used_tokens: int) -> None:
    """Record pressure on the KV cache; clear it below the threshold."""
    threshold = KV_PRESSURE * worker.kv_tokens
    worker.pressed = used_tokens if worker.requests and used_tokens > threshold > 0 else 0
    state.touch(worker)
    state.trigger = f"the KV cache of {worker.name} holds {used_tokens} tokens"


def note_off_engine(state: State, worker: Worker, requests: int) -> None:
    """Record off-engine requests."""
    worker.off_engine = min(max(0, requests), len(worker.requests))
    state.touch(worker)


def close_worker(state: State, worker: Worker, *, orderly: bool) -> None:
    """Remove an incarnation and queue its requests; only a loss counts as a failed attempt."""
    state.remove(worker)
    state.trigger = f"{worker.name} has left" if orderly else f"{worker.name} is lost"
    for name in sorted(name for name, scoring in state.scoring.items() if scoring.by(worker)):
        if orderly:
            state.scoring[name].worker, state.scoring[name].incarnation = "", -1
        else:
            error = f"WorkerLost: {worker.name} was lost"
            fault_scoring(state, state.groups[name], error, retryable=True)
    for trajectory in sorted(worker.requests):
        if orderly:
            requeue(state, trajectory)
        else:
            fault(state, trajectory, f"WorkerLost: {worker.name} was lost")


def set_ending(state: State, group: Group, verdict: Verdict) -> None:
    """Record an outcome: the group leaves U and waits for its `end`."""
    leave_u(state, group)
    state.leaves.touch("group", group.spec.group)
    state.scoring.pop(group.spec.group, None)
    group.phase = "ending"
    group.verdict = verdict
    state.ending.append(group.spec.group)


def take_group(state: State, group: Group) -> None:
    """Move a finished group into the batch."""
    leave_u(state, group)
    state.leaves.touch("group", group.spec.group)
    group.phase = "taken"


def take_part(state: State, names: Sequence[str]) -> None:
    """Move finished groups into a part; they stay in U, due at the next step."""
    for name in names:
        take_group(state, state.groups[name])
    _count(state, state.standing().step, len(names))
    state.parts.append(tuple(names))


def give_up_parts(state: State) -> None:
    """Return parts to the finished groups, with their old deadlines."""
    names = state.in_parts
    end_parts(state)
    for name in names:
        return_to_u(state, state.groups[name])


def end_parts(state: State) -> None:
    """Remove parts from U; the caller sets their phase."""
    if state.parts:
        _count(state, state.standing().step, -len(state.in_parts))
        state.parts = []


def leave_u(state: State, group: Group) -> None:
    """Remove a group from U; the caller changes its phase."""
    if group.spec.purpose == "eval" or group.phase not in UNTAKEN:
        return
    _count(state, group.spec.deadline, -1)
    if group.phase == "finished":
        del state.finished[bisect_left(state.finished, group.key)]
    else:
        state.index.end(group.spec)


def return_to_u(state: State, group: Group) -> None:
    """Return a group of a refused batch to U."""
    group.phase = "finished"
    state.leaves.touch("group", group.spec.group)
    _count(state, group.spec.deadline, 1)
    insort(state.finished, group.key)


def fail_batch(state: State, training: Training) -> None:
    """Fail a batch that cannot be trained, for example after a non-finite loss."""
    end_training(state, training)
    for name in training.groups:
        set_ending(state, state.groups[name], Verdict(outcome="failed", why="non-finite"))


def in_flight_due(state: State) -> float | None:
    """Return the automatic limit from the next batch on; None if not automatic."""
    limit = in_flight_after(state)
    return None if limit is None else limit.batches


def in_flight_after(state: State) -> InFlight | None:
    """Return the automatic limit's next state; None if not automatic."""
    assert state.config is not None
    if (limit := state.automatic) is None:
        return None
    most = async_batches(state.config.staleness)
    return limit.at_batch(per_step=state.config.rollout.prompts_per_step, most=most)


def end_training(state: State, training: Training) -> None:
    """Give up the batch in training; the step is tried again."""
    give_up_parts(state)
    state.training = None
    state.attempt = training.attempt + 1


def forget(state: State, group: Group) -> None:
    """Remove an ended group, and its digest if unused."""
    spec = group.spec
    del state.groups[spec.group]
    state.redundant.pop(spec.group, None)
    state.leaves.touch("group", spec.group)
    state.pins[spec.version] -= 1
    if not state.pins[spec.version]:
        del state.pins[spec.version]
        if spec.version != state.version:
            del state.policies[spec.version]


def note_failure(state: State, group: Group) -> None:
    """Count a failed training group."""
    assert state.config is not None and group.verdict is not None
    verdict = group.verdict
    state.failures = note(
        state.failures,
        state.config.rollout,
        ended_groups=ended(state.counters.outcomes),
        error=verdict.error or verdict.why,
        trajectory=verdict.trajectory or trajectory_id(group.spec.group, 0),
    )


def halt_now(state: State) -> Halt | None:
    """Return the halt if due."""
    if state.config is None:
        return None
    return halt_due(
        state.failures, state.config.rollout, ended_groups=ended(state.counters.outcomes)
    )


def go_on_after_failures(state: State) -> None:
    """Resume a halted run."""
    state.failures = Failures(since=ended(state.counters.outcomes))
    state.trigger = "the run was resumed"


def new_version(state: State, digest: str) -> None:
    """Increment the version; keep the old digest while groups use it."""
    if state.version not in state.pins:
        del state.policies[state.version]
    state.version += 1
    if state.partial_rollout:
        _follow(state)
    state.policies[state.version] = digest
    curriculum.new_version(state)
    if (limit := state.automatic) is not None:
        state.in_flight = limit.at_commit(len(state.finished) + len(state.in_parts))
    state.trigger = f"version {state.version} is there"


def _follow(state: State) -> None:
    older = state.queues.pop(state.version - 1, [])
    for key in older:
        spec = state.groups[group_of(key.trajectory)].spec
        push(state.queues, state.queue_of(spec), key)


def _unschedule(state: State, trajectory: str, request: Request) -> None:
    _unaim(state, trajectory, request)
    _take_off(state, trajectory, request)
    request.kv = None


def _take_off(state: State, trajectory: str, request: Request) -> None:
    state.leaves.touch("request", trajectory)
    worker = state.worker_of(request.worker, request.incarnation)
    if worker is not None:
        worker.requests.discard(trajectory)
        # An ending request probably needed no slot; the next observation corrects this.
        worker.off_engine = max(0, worker.off_engine - 1)
        if request.moving is not None:
            worker.leaving -= 1
        state.touch(worker)
        if not worker.requests:
            state.trigger = f"{worker.name} is idle"
            if worker.pressed:
                worker.pressed = 0
                state.touch(worker)
    request.worker, request.incarnation = "", -1


def _unaim(state: State, trajectory: str, request: Request) -> None:
    state.leaves.touch("request", trajectory)
    if request.moving is None:
        return
    to = state.worker_of(*request.moving)
    if to is not None:
        to.arriving -= 1
        state.touch(to)
    source = state.worker_of(request.worker, request.incarnation)
    if source is not None:
        source.leaving -= 1
        state.touch(source)
    request.moving = None
    state.released.pop(trajectory, None)


def _count(state: State, deadline: int, by: int) -> None:
    count = state.deadlines.get(deadline, 0) + by
    assert count >= 0
    if count:
        state.deadlines[deadline] = count
    else:
        del state.deadlines[deadline]


COMPLETE: Final = Verdict(outcome="trained", why="complete")
"""Group that waits for its batch; not an outcome yet."""


def outcome_of(group: Group, rules: Rollout, *, over: bool = False) -> Verdict | None:
    """Return `COMPLETE`, the certain outcome, or None while open trajectories matter.

    A group is complete with its first `size` valid trajectories, when all have ended, or when
    `over`. It fails as soon as it cannot reach `min_valid_trajectories`.
    """
    size, samples = group.spec.size, group.spec.samples
    ended = over or group.phase == "scoring" or group.ended == samples
    if group.spec.purpose == "eval":
        return _evaluated(group) if ended else None
    invalid = group.ended - group.valid
    if (group.valid if ended else samples - invalid) < min(rules.min_valid_trajectories, size):
        late = f"{group.valid} of {size} trajectories were valid when its time was over"
        why = late if over else f"{invalid} of {samples} trajectories are not valid"
        return Verdict(outcome="failed", why=why)
    if not ended and group.valid < size:
        return None
    if rules.filter_zero_advantage and len(set(group.rewards)) <= 1:
        return Verdict(outcome="filtered", why="all valid rewards are equal: no advantage")
    return COMPLETE


def _evaluated(group: Group) -> Verdict:
    rewards = group.rewards
    mean = f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no valid reward"
    return Verdict(outcome="evaluated", why=f"{mean} over {len(rewards)} of {group.spec.size}")
