"""The few moves that records and decisions are made of; each keeps the indexes of State in step.

They check nothing: whoever calls them has made sure that the move is legal. What they change they
touch in the leaves, be it only that it is gone. `outcome_of` alone decides: what a
group has come to, from its siblings' results.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from typing import Final

from dora_pipe.config.model import Groups, in_flight_batches
from dora_pipe.orchestrator import curriculum
from dora_pipe.orchestrator.failures import ended, halt_due, note, resumed
from dora_pipe.orchestrator.in_flight import InFlight
from dora_pipe.orchestrator.index import pull, push, queue_key
from dora_pipe.orchestrator.scoring import Scoring, is_due
from dora_pipe.orchestrator.state import (
    KV_PRESSURE,
    UNTAKEN,
    Group,
    Outcome,
    Request,
    Residence,
    Result,
    State,
    Training,
    Worker,
)
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import group_of, trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import NO_VERSION, GroupSpec, Halt, SiblingFate


def admit(state: State, spec: GroupSpec) -> None:
    """A dispatched group is open and its siblings queue; a training group enters U."""
    state.groups[spec.group] = Group(spec=spec, results=[None] * spec.siblings)
    state.leaves.touch("group", spec.group)
    state.pins[spec.version] = state.pins.get(spec.version, 0) + 1
    if spec.purpose == "train":
        _count(state, spec.deadline, 1)
        state.index.begin(spec)
    for sibling in range(spec.siblings):
        trajectory = trajectory_id(spec.group, sibling)
        state.requests[trajectory] = Request(group=spec.group, sibling=sibling)
        state.leaves.touch("request", trajectory)
        push(state.queues, state.queue_of(spec), queue_key(spec, sibling))


def place(state: State, trajectory: str, attempt: int, worker: Worker) -> None:
    """A queued request is on a worker now."""
    request = state.requests[trajectory]
    spec = state.groups[request.group].spec
    pull(state.queues, state.queue_of(spec), queue_key(spec, request.sibling))
    _unaim(state, trajectory, request)
    request.attempt = attempt
    request.worker, request.epoch = worker.name, worker.epoch
    request.kv = None
    if request.began_ns < 0:
        request.began_ns = state.now_ns
    worker.requests.add(trajectory)
    state.leaves.touch("request", trajectory)
    state.touch(worker)


def aim(state: State, trajectory: str, to: Worker | None) -> None:
    """A placed request moves: its worker shall let go of it, and its place on `to` is kept. Without
    one it will queue, and that its worker sleeps is none of the moves that are bounded."""
    request = state.requests[trajectory]
    worker = state.workers[request.worker]
    request.moving = ANYWHERE if to is None else (to.name, to.epoch)
    request.moved_ns = state.now_ns
    worker.leaving += 1
    state.leaves.touch("request", trajectory)
    state.touch(worker)
    if to is not None:
        request.moves += 1
        to.arriving += 1
        state.touch(to)


ANYWHERE: Final = ("", -1)
"""`Request.moving` of one that no place is kept for."""


def requeue(state: State, trajectory: str) -> None:
    """A placed request waits for a worker again."""
    request = state.requests[trajectory]
    _unplace(state, trajectory, request)
    spec = state.groups[request.group].spec
    push(state.queues, state.queue_of(spec), queue_key(spec, request.sibling))
    state.counters.requeued += 1


def release(state: State, trajectory: str, kv: Blob | None) -> None:
    """Its worker has let go of a request: it queues, and its place on the one it moves to stays."""
    request = state.requests[trajectory]
    moving = request.moving
    if moving is not None:
        state.seen.released(state.now_ns - request.moved_ns)
    _take_off(state, trajectory, request)
    spec = state.groups[request.group].spec
    push(state.queues, state.queue_of(spec), queue_key(spec, request.sibling))
    request.kv = kv
    state.counters.moved += 1
    if moving is None:
        return
    state.released[trajectory] = None
    if moving == ANYWHERE or _sleeps(state, moving):
        _unaim(state, trajectory, request)


def _sleeps(state: State, incarnation: tuple[str, int]) -> bool:
    """Whether a worker that requests move to was told to sleep meanwhile."""
    name, epoch = incarnation
    worker = state.workers.get(name)
    return worker is not None and worker.epoch == epoch and worker.target == NO_VERSION


def note_progress(state: State, trajectory: str, resume: Resume) -> None:
    """An open request goes on from there, unless it is known to have come further."""
    request = state.requests[trajectory]
    if request.resume is None or resume.tokens > request.resume.tokens:
        request.resume = resume
        state.leaves.touch("request", trajectory)


def fault(state: State, trajectory: str, error: str) -> None:
    """A placement came to nothing: the request queues again, or has had all its attempts.

    One that nobody waits for has no result any more: it queues until its end is decided.
    """
    assert state.config is not None
    request = state.requests[trajectory]
    request.faults += 1
    state.leaves.touch("request", trajectory)
    if request.faults < state.config.groups.attempts_max or request.group in state.surplus:
        requeue(state, trajectory)
    else:
        fail_sibling(state, trajectory, error)


def fail_sibling(state: State, trajectory: str, error: str) -> None:
    """A sibling ends without a trajectory."""
    state.counters.siblings_failed += 1
    end_sibling(state, trajectory, Result(taken=None, reward=None, tokens=0), error=error)


def end_sibling(state: State, trajectory: str, result: Result, *, error: str) -> None:
    """A placed request ends; its group may be complete now, or beyond hope.

    `error` says why it is not valid, where it is not and that is known.
    """
    assert state.config is not None
    request = state.requests.pop(trajectory)
    if result.taken is not None:
        state.seen.lived(state.now_ns - request.began_ns)
    _unplace(state, trajectory, request)
    group = state.groups[request.group]
    state.leaves.touch("group", request.group)
    assert group.results[request.sibling] is None
    group.results[request.sibling] = result
    group.ended += 1
    group.valid += result.reward is not None
    if group.phase == "generating":
        _settle(state, group, error=error, trajectory=trajectory)
        if group.phase != "generating":
            _leave_over(state, group, "surplus")


TIME_OVER: Final = "GroupExpired: it was open for longer than groups.seconds_max"


def expire(state: State, group: Group) -> None:
    """A group that generates is not waited for any longer."""
    state.leaves.touch("group", group.spec.group)
    left = trajectory_id(group.spec.group, left_of(group)[0])
    _settle(state, group, error=TIME_OVER, trajectory=left, over=True)
    _leave_over(state, group, "expired")


def _leave_over(state: State, group: Group, fate: SiblingFate) -> None:
    """The siblings of a group without a result are waited for no longer. Those of one that has
    failed without having expired end with it, as they always did."""
    failed = group.outcome is not None and group.outcome.fate == "failed"
    if group.ended < group.spec.siblings and not (failed and fate == "surplus"):
        state.surplus[group.spec.group] = fate


def end_surplus(state: State, group: Group) -> None:
    """What is left over of a group has ended; none of it runs."""
    del state.surplus[group.spec.group]
    for name in open_siblings(state, group):
        drop(state, name)


def left_of(group: Group) -> tuple[int, ...]:
    """The siblings without a result, in order."""
    return tuple(place for place, one in enumerate(group.results) if one is None)


def open_siblings(state: State, group: Group) -> list[str]:
    """Trajectory ids of its requests that are queued or placed, in order."""
    names = (trajectory_id(group.spec.group, one) for one in range(group.spec.siblings))
    return [name for name in names if name in state.requests]


def _settle(
    state: State, group: Group, *, error: str = "", trajectory: str = "", over: bool = False
) -> None:
    """What a group has come to, now that a sibling has ended or all were scored together; `over`:
    or that nobody waits for it any longer.

    `trajectory` is the sibling that decides it where it has failed, and `error` says why.
    """
    assert state.config is not None
    found = outcome_of(group, state.config.groups, over=over)
    if found is not None and found.fate != "failed" and is_due(state, group):
        group.phase = "scoring"
        state.scoring[group.spec.group] = Scoring()
        return
    if found is not None and found.fate in ("trained", "filtered"):
        curriculum.note_ended(state, group)
    if found is COMPLETE:
        group.phase = "finished"
        state.leaves.complete(group.taken())
        state.index.end(group.spec)
        insort(state.finished, group.key)
    elif found is not None:
        if found.fate == "failed":
            found = Outcome(fate="failed", why=found.why, error=error, trajectory=trajectory)
        set_ending(state, group, found)


def begin_scoring(state: State, group: Group, worker: Worker) -> None:
    """A worker is asked to score the siblings of a group together."""
    scoring = state.scoring[group.spec.group]
    scoring.attempt += 1
    scoring.worker, scoring.epoch = worker.name, worker.epoch


def end_scoring(state: State, group: Group, rewards: Mapping[str, float]) -> None:
    """The siblings have their rewards, by trajectory; only now the group has come to something."""
    del state.scoring[group.spec.group]
    state.leaves.touch("group", group.spec.group)
    for place, one in enumerate(group.results):
        if one is not None and one.taken is not None and one.reward is not None:
            reward = rewards[one.taken.trajectory]
            group.results[place] = Result(
                taken=one.taken, reward=reward, tokens=one.tokens, scored=True
            )
    _settle(state, group)


def fault_scoring(state: State, group: Group, error: str, *, retryable: bool) -> None:
    """An attempt to score a group came to nothing: it waits again, or has had all of them."""
    assert state.config is not None
    scoring = state.scoring[group.spec.group]
    scoring.faults += 1
    scoring.worker, scoring.epoch = "", -1
    if not retryable or scoring.faults >= state.config.groups.attempts_max:
        _fail_scoring(state, group, error)


def _fail_scoring(state: State, group: Group, error: str) -> None:
    """No sibling has a reward that counts: a training group fails, an evaluation has no figure."""
    del state.scoring[group.spec.group]
    state.leaves.touch("group", group.spec.group)
    group.results = [
        one and Result(taken=one.taken, reward=None, tokens=one.tokens) for one in group.results
    ]
    group.valid = 0
    _settle(state, group, error=error, trajectory=trajectory_id(group.spec.group, 0))


def drop(state: State, trajectory: str) -> None:
    """An open request, queued or placed, is not needed any more."""
    request = state.requests.pop(trajectory)
    if request.worker:
        _unplace(state, trajectory, request)
        return
    _unaim(state, trajectory, request)
    spec = state.groups[request.group].spec
    pull(state.queues, state.queue_of(spec), queue_key(spec, request.sibling))


def join_worker(state: State, worker: Worker, *, versions: int = 1) -> None:
    """A fresh incarnation is there, which hosts so many versions at once."""
    state.workers[worker.name] = worker
    if versions > 1:
        state.residents[worker.name] = Residence(most=versions)
    state.mark(worker)
    state.trigger = f"{worker.name} joined"


def assign(
    state: State, worker: Worker, version: int, digest: str, drop: tuple[int, ...] = ()
) -> None:
    """A worker shall host another version; without requests, unless they go on under it, or keep
    theirs beside it, or it is to sleep when they are gone: then no place is kept there."""
    worker.target, worker.digest, worker.target_ns = version, digest, state.now_ns
    for one in drop:
        state.residents[worker.name].held.remove(one)
    if version == NO_VERSION:
        here = (worker.name, worker.epoch)
        for name in [one for one in state.released if state.requests[one].moving == here]:
            _unaim(state, name, state.requests[name])
    state.touch(worker)


def ready(state: State, worker: Worker, load_ns: int) -> None:
    """A worker hosts what it was assigned."""
    worker.hosted, worker.load_ns = worker.target, load_ns
    residence = state.residents.get(worker.name)
    if residence is not None and worker.hosted not in residence.held:
        insort(residence.held, worker.hosted)
    state.touch(worker)
    state.trigger = f"{worker.name} is ready"


def press(state: State, worker: Worker, used_tokens: int) -> None:
    """How full the KV cache of a worker is now, if that is too full."""
    threshold = KV_PRESSURE * worker.kv_tokens
    worker.pressed = used_tokens if worker.requests and used_tokens > threshold > 0 else 0
    state.mark(worker)
    state.trigger = f"the KV cache of {worker.name} holds {used_tokens} tokens"


def note_off_engine(state: State, worker: Worker, requests: int) -> None:
    """So many of a worker's requests need no slot; of those that it has here."""
    worker.off_engine = min(max(0, requests), len(worker.requests))
    state.touch(worker)


def close_worker(state: State, worker: Worker, *, orderly: bool) -> None:
    """An incarnation is out; what it had queues again. Only a loss counts against attempts."""
    state.remove(worker)
    state.trigger = f"{worker.name} has left" if orderly else f"{worker.name} is lost"
    for name in sorted(name for name, one in state.scoring.items() if one.by(worker)):
        if orderly:
            state.scoring[name].worker, state.scoring[name].epoch = "", -1
        else:
            error = f"WorkerLost: {worker.name} was lost"
            fault_scoring(state, state.groups[name], error, retryable=True)
    for trajectory in sorted(worker.requests):
        if orderly:
            requeue(state, trajectory)
        else:
            fault(state, trajectory, f"WorkerLost: {worker.name} was lost")


def set_ending(state: State, group: Group, outcome: Outcome) -> None:
    """A group's fate is known: it leaves U at once and waits for its `end` decision."""
    leave_u(state, group)
    state.leaves.touch("group", group.spec.group)
    state.scoring.pop(group.spec.group, None)
    group.phase = "ending"
    group.outcome = outcome
    state.ending.append(group.spec.group)


def take_group(state: State, group: Group) -> None:
    """A finished group is in a batch now."""
    leave_u(state, group)
    state.leaves.touch("group", group.spec.group)
    group.phase = "taken"


def take_part(state: State, names: Sequence[str]) -> None:
    """Finished groups are in a part of the next step: they stay in U, due at it."""
    for name in names:
        take_group(state, state.groups[name])
    _count(state, state.standing().step, len(names))
    state.parts.append(tuple(names))


def give_up_parts(state: State) -> None:
    """The groups of all parts are finished as before, with their deadlines."""
    names = state.in_parts
    end_parts(state)
    for name in names:
        return_to_u(state, state.groups[name])


def end_parts(state: State) -> None:
    """The groups of all parts leave U; what becomes of them is the caller's affair."""
    if state.parts:
        _count(state, state.standing().step, -len(state.in_parts))
        state.parts = []


def leave_u(state: State, group: Group) -> None:
    """A group of U is taken, or ends; its phase is the caller's to change."""
    if group.spec.purpose == "eval" or group.phase not in UNTAKEN:
        return
    _count(state, group.spec.deadline, -1)
    if group.phase == "finished":
        del state.finished[bisect_left(state.finished, group.key)]
    else:
        state.index.end(group.spec)


def return_to_u(state: State, group: Group) -> None:
    """A group of a batch that was refused waits for the next one, with its deadline."""
    group.phase = "finished"
    state.leaves.touch("group", group.spec.group)
    _count(state, group.spec.deadline, 1)
    insort(state.finished, group.key)


def fail_batch(state: State, training: Training) -> None:
    """The step cannot be trained (a loss that is not finite): its groups end as failed."""
    end_training(state, training)
    for name in training.groups:
        set_ending(state, state.groups[name], Outcome(fate="failed", why="non-finite"))


def in_flight_due(state: State) -> float | None:
    """C from the next batch on, where it is automatic."""
    known = in_flight_after(state)
    return None if known is None else known.batches


def in_flight_after(state: State) -> InFlight | None:
    """What C follows when the next batch is taken, where it is automatic."""
    assert state.config is not None
    if (known := state.automatic) is None:
        return None
    most = in_flight_batches(state.config.staleness)
    return known.at_batch(per_step=state.config.groups.per_step, most=most)


def end_training(state: State, training: Training) -> None:
    """The batch in training comes to nothing; the step is tried again with another one, and what
    the step after it had in a part may be due in that."""
    give_up_parts(state)
    state.training = None
    state.attempt = training.attempt + 1


def forget(state: State, group: Group) -> None:
    """A group has ended: it leaves the state, and so does its policy if nothing else needs it."""
    spec = group.spec
    del state.groups[spec.group]
    state.surplus.pop(spec.group, None)
    state.leaves.touch("group", spec.group)
    state.pins[spec.version] -= 1
    if not state.pins[spec.version]:
        del state.pins[spec.version]
        if spec.version != state.version:
            del state.policies[spec.version]


def note_failure(state: State, group: Group) -> None:
    """A training group has ended as failed; what that may come to is `failures`' to say."""
    assert state.config is not None and group.outcome is not None
    outcome = group.outcome
    state.failures = note(
        state.failures,
        state.config.groups,
        at=ended(state.counters.fates),
        error=outcome.error or outcome.why,
        trajectory=outcome.trajectory or trajectory_id(group.spec.group, 0),
    )


def halt_now(state: State) -> Halt | None:
    """The decision that the run stops because its groups fail, if that is due."""
    if state.config is None:
        return None
    return halt_due(state.failures, state.config.groups, at=ended(state.counters.fates))


def go_on_after_failures(state: State) -> None:
    """A halted run goes on, and counts anew."""
    state.failures = resumed(ended(state.counters.fates))
    state.trigger = "the run was resumed"


def new_version(state: State, digest: str) -> None:
    """Version t becomes t + 1; the old one stays known while an open group carries it."""
    if state.version not in state.pins:
        del state.policies[state.version]
    state.version += 1
    if state.interruptible:
        _follow(state)
    state.policies[state.version] = digest
    curriculum.new_version(state)
    if (known := state.automatic) is not None:
        state.in_flight = known.at_commit(len(state.finished) + len(state.in_parts))
    state.trigger = f"version {state.version} is there"


def _follow(state: State) -> None:
    """Queued requests that may run under the newest version wait for that from now on."""
    older = state.queues.pop(state.version - 1, [])
    for key in older:
        spec = state.groups[group_of(key.trajectory)].spec
        push(state.queues, state.queue_of(spec), key)


def _unplace(state: State, trajectory: str, request: Request) -> None:
    """Take a request off its worker, if that incarnation is there; nobody expects it any more."""
    _unaim(state, trajectory, request)
    _take_off(state, trajectory, request)
    request.kv = None


def _take_off(state: State, trajectory: str, request: Request) -> None:
    """Take a request off its worker, which may have nothing left to do then."""
    state.leaves.touch("request", trajectory)
    worker = state.workers.get(request.worker)
    if worker is not None and worker.epoch == request.epoch:
        worker.requests.discard(trajectory)
        # Who ends did not need a slot any more. Where it did, the next observation says so.
        worker.off_engine = max(0, worker.off_engine - 1)
        if request.moving is not None:
            worker.leaving -= 1
        state.touch(worker)
        if not worker.requests:
            state.trigger = f"{worker.name} is idle"
            if worker.pressed:
                worker.pressed = 0
                state.mark(worker)
    request.worker, request.epoch = "", -1


def _unaim(state: State, trajectory: str, request: Request) -> None:
    """The worker that a request was to move to does not wait for it any more."""
    state.leaves.touch("request", trajectory)
    if request.moving is None:
        return
    name, epoch = request.moving
    to = state.workers.get(name)
    if to is not None and to.epoch == epoch:
        to.arriving -= 1
        state.touch(to)
    source = state.workers.get(request.worker)
    if source is not None and source.epoch == request.epoch:
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


COMPLETE: Final = Outcome(fate="trained", why="complete")
"""Enough siblings are valid and no other is waited for: the group waits for its batch. Not a fate
yet."""


def outcome_of(group: Group, rules: Groups, *, over: bool = False) -> Outcome | None:
    """`COMPLETE`, the fate that is now certain, or None while siblings still matter.

    A group is complete with its first `size` valid siblings, or when all have ended, or `over`:
    when it is not waited for any longer. One that can no longer reach `min_valid_siblings` fails at
    once: its other siblings are not waited for, whatever their length.
    """
    size, siblings = group.spec.size, group.spec.siblings
    ended = over or group.phase == "scoring" or group.ended == siblings
    if group.spec.purpose == "eval":
        return _evaluated(group) if ended else None
    invalid = group.ended - group.valid
    if (group.valid if ended else siblings - invalid) < min(rules.min_valid_siblings, size):
        late = f"{group.valid} of {size} siblings were valid when its time was over"
        why = late if over else f"{invalid} of {siblings} siblings are not valid"
        return Outcome(fate="failed", why=why)
    if not ended and group.valid < size:
        return None
    if rules.filter_zero_advantage and _all_equal(group):
        return Outcome(fate="filtered", why="all valid rewards are equal: no advantage")
    return COMPLETE


def _evaluated(group: Group) -> Outcome:
    rewards = [one.reward for one in group.results if one is not None and one.reward is not None]
    mean = f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no valid reward"
    return Outcome(fate="evaluated", why=f"{mean} over {len(rewards)} of {group.spec.size}")


def _all_equal(group: Group) -> bool:
    rewards = {one.reward for one in group.results if one is not None and one.reward is not None}
    return len(rewards) <= 1
