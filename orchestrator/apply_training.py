"""Decides what the trainer's facts change: a commit, a refused batch, adopted weights."""

from __future__ import annotations

from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.specs import pinned
from dora_pipe.orchestrator.state import State, Training, Verdict
from dora_pipe.orchestrator.state_ops import forget, new_version, return_to_u, set_ending
from dora_pipe.schemas.batch import batch_digest, staleness_of
from dora_pipe.schemas.control import BatchRefused, StepCommitted, VersionsDropped, WeightsAdopted


def step_committed(state: State, offset: int, record: StepCommitted) -> str:
    """Version t becomes t + 1 and the batch is trained; legal for exactly the batch taken."""
    training = state.training
    why = _not_of(state, record.step, record.attempt, record.role_epoch)
    if why or training is None:
        return why
    if not training.digest == record.batch_digest == _digest(record):
        return f"the batch of step {record.step} is not the one that was taken"
    if record.digest_before != state.policies[state.version]:
        return f"step {record.step} began with other weights than version {state.version}"
    if record.policy.digest != record.digest_after:
        return f"the manifest of step {record.step} is of other weights"
    state.training = None
    state.attempt = 1
    state.eval_row = 0
    trained = [state.groups[group] for group in training.groups]
    new_version(state, record.digest_after)
    for group in trained:
        staleness = staleness_of(record.step, group.spec.version)
        state.tally.staleness[staleness] = state.tally.staleness.get(staleness, 0) + 1
        forget(state, group)
    fates = state.tally.fates
    fates["trained"] = fates.get("trained", 0) + len(trained)
    return ""


def batch_refused(state: State, offset: int, record: BatchRefused) -> str:
    """The offenders will end as failed, the other groups return to U with their deadlines."""
    training = state.training
    why = _not_of(state, record.step, record.attempt, record.role_epoch)
    if why or training is None:
        return why
    offenders = {one.group: one for one in record.offenders}
    if not offenders:
        return "a refusal without an offender would be taken again for ever"
    if not offenders.keys() <= set(training.groups):
        return "an offender is not in the batch"
    _end_training(state, training)
    for name in training.groups:
        group = state.groups[name]
        if name in offenders:
            one = offenders[name]
            why = f"unreadable: {one.why}"
            verdict = Verdict(fate="failed", why=why, error=why, trajectory=one.trajectory)
            set_ending(state, group, verdict)
        else:
            return_to_u(state, group)
    return ""


def fail_batch(state: State, training: Training) -> None:
    """The step cannot be trained (a loss that is not finite): its groups end as failed."""
    _end_training(state, training)
    for name in training.groups:
        set_ending(state, state.groups[name], Verdict(fate="failed", why="non-finite"))


def adopted(state: State, offset: int, record: WeightsAdopted) -> str:
    """Changes nothing here: the committed weights stay what they are."""
    if record.role_epoch != state.trainer_epoch:
        return f"role epoch {record.role_epoch} is not the trainer's"
    return ""


def versions_dropped(state: State, offset: int, record: VersionsDropped) -> str:
    """Changes nothing here; what is in use may not be dropped."""
    used = sorted({state.version, *pinned(state)}.intersection(record.versions))
    return f"version {used[0]} is in use" if used else ""


def _not_of(state: State, step: int, attempt: int, role_epoch: int) -> str:
    """Why this is not about the batch in training, told by its trainer."""
    if role_epoch != state.trainer_epoch:
        return f"role epoch {role_epoch} is not the trainer's, {state.trainer_epoch} is"
    training = state.training
    if training is None:
        return f"no batch is in training, step {step} least of all"
    if (step, attempt) != (training.step, training.attempt):
        return f"(step {step}, attempt {attempt}) is not in training"
    return ""


def _end_training(state: State, training: Training) -> None:
    state.training = None
    state.attempt = training.attempt + 1


def _digest(record: StepCommitted) -> str:
    try:
        return batch_digest(record.groups)
    except SchemaError:
        return ""
