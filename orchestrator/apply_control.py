"""Effects of control records, and checks that reject illegal ones.

1. `apply_control` never raises because of a record.
2. Handlers check everything before they change anything. They return why a record is illegal, or an
   empty string.
3. Records of old incarnations, unneeded trajectories and old attempts are normal; they change
   nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from dora_pipe.config.logged import logged_config
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.core.errors import SchemaError
from dora_pipe.orchestrator.apply_command import apply_command
from dora_pipe.orchestrator.apply_decision import pinned
from dora_pipe.orchestrator.entities import Request, Result, Verdict, Worker
from dora_pipe.orchestrator.scoring import answer_error
from dora_pipe.orchestrator.serving import VERSIONS_MAX
from dora_pipe.orchestrator.state import State
from dora_pipe.orchestrator.state_ops import (
    close_worker,
    end_sample,
    end_scoring,
    end_training,
    fail_sample,
    fault,
    fault_scoring,
    forget,
    join_worker,
    new_version,
    note_progress,
    ready,
    release,
    return_to_u,
    set_ending,
)
from dora_pipe.schemas.batch import batch_digest
from dora_pipe.schemas.control import (
    REPLAY_DIFFERS,
    AnyControl,
    BatchRefused,
    Command,
    GroupScored,
    LoggedEntry,
    RequestFailed,
    RequestReleased,
    RoleStarted,
    RunStarted,
    StepCommitted,
    TakenTrajectory,
    TrajectoriesLogged,
    VersionsDropped,
    WeightsAdopted,
    WorkerJoined,
    WorkerLeft,
    WorkerReady,
    decode_control,
)
from dora_pipe.schemas.topics import worker_name_error
from dora_pipe.schemas.wire import Unknown

REJECTION_CHARACTERS_MAX: Final = 300

SLOTS_MAX: Final = 65_536
"""Maximum slots or prefetch accepted from a worker."""

MOVES: Final = "moves"
"""Capability to release and continue running requests."""

LOAD_MS_MAX: Final = 3_600_000.0
"""Upper bound for a reported load time."""


def read_control(value: bytes) -> AnyControl | Unknown | SchemaError:
    """Decode a control record, or return its error."""
    try:
        return decode_control(value)
    except SchemaError as error:
        return error


def apply_control(state: State, offset: int, record: AnyControl | Unknown | SchemaError) -> None:
    """Fold the control record at `offset`; constant cost in the number of requests."""
    if isinstance(record, Unknown | SchemaError):
        return
    why = _APPLY[type(record)](state, offset, record)
    if why:
        state.counters.rejected += 1
        kind = type(record).__struct_config__.tag
        state.counters.rejection = f"{kind} at offset {offset}: {why}"[:REJECTION_CHARACTERS_MAX]


def _run_started(state: State, offset: int, record: RunStarted) -> str:
    if state.started is not None:
        return "the run has already started"
    try:
        config = logged_config(record.config)
    except msgspec.ValidationError as error:
        return f"its configuration cannot be read: {error}"
    if record.dataset_rows < 1:
        return "the data set has no rows"
    if why := _data_error(record, config):
        return why
    state.started = record
    state.config = config
    state.policies[0] = record.policy.digest
    return ""


def _data_error(record: RunStarted, config: Config) -> str:
    for pool in pool_specs(config):
        for source in pool.sources:
            data = record.data(source)
            if data is None or (source.startswith("train") and data.rows < 1):
                return f"the number of rows of {source} is missing"
    return ""


def _role_started(state: State, offset: int, record: RoleStarted) -> str:
    orchestrates = record.role == "orchestrator"
    newest = state.orchestrator_incarnation if orchestrates else state.trainer_incarnation
    if record.incarnation <= newest:
        return f"incarnation {record.incarnation} is not newer than {newest}"
    if orchestrates:
        state.orchestrator_incarnation = record.incarnation
        state.samplers = record.samplers
    else:
        state.trainer_incarnation = record.incarnation
    return ""


def _worker_joined(state: State, offset: int, record: WorkerJoined) -> str:
    if state.started is None:
        return "the run has not started"
    if not record.worker:
        return "it has no name"
    if not (1 <= record.slots <= SLOTS_MAX and 0 <= record.prefetch <= SLOTS_MAX):
        return f"{record.slots} slots and {record.prefetch} prefetch are invalid"
    if not 1 <= record.max_resident_versions <= VERSIONS_MAX:
        return f"{record.max_resident_versions} resident versions are invalid"
    if record.colocated and (state.partial_rollout or record.max_resident_versions > 1):
        return f"{record.worker} is colocated but serves several versions"
    if record.assets_digest != state.started.assets_digest:
        return f"{record.worker} differs from the run in its model configuration or tokenizer"
    older = state.workers.get(record.worker)
    if older is not None:
        close_worker(state, older, orderly=False)
    worker = Worker(
        name=record.worker,
        incarnation=offset,
        slots=record.slots,
        prefetch=record.prefetch,
        moves=MOVES in record.declares,
        kv_tokens=max(0, record.kv_tokens),
        colocated=record.colocated,
        silent=bool(worker_name_error(record.worker)),  # its records would not be readable
    )
    # Partial rollout never uses older versions again.
    join_worker(
        state, worker, versions=1 if state.partial_rollout else record.max_resident_versions
    )
    return ""


def _worker_ready(state: State, offset: int, record: WorkerReady) -> str:
    worker = state.worker_of(record.worker, record.incarnation)
    if worker is None:
        return ""
    if (record.version, record.digest) != (worker.target, worker.digest):
        return f"{worker.name} has version {record.version}, its target is {worker.target}"
    ready(state, worker, int(min(max(record.load_ms, 0.0), LOAD_MS_MAX) * 1e6))
    return ""


def _worker_left(state: State, offset: int, record: WorkerLeft) -> str:
    worker = state.worker_of(record.worker, record.incarnation)
    if worker is None:
        return ""
    for trajectory in sorted(worker.requests & record.progress.keys()):
        note_progress(state, trajectory, record.progress[trajectory])
    close_worker(state, worker, orderly=True)
    return ""


def _trajectories_logged(state: State, offset: int, record: TrajectoriesLogged) -> str:
    if state.worker_of(record.worker, record.incarnation) is None:
        return ""
    why = ""
    for entry in record.trajectories:
        why = _logged(state, record, entry) or why
    return why


def _logged(state: State, record: TrajectoriesLogged, entry: LoggedEntry) -> str:
    name = entry.trajectory
    request = _present(state, record, name, entry.attempt)
    if request is None:
        return ""
    spec = state.groups[request.group].spec
    if (record.version, record.digest) != (spec.version, spec.digest):
        return f"{name} is of version {record.version}, not {spec.version} (C1)"
    if entry.partition != spec.partition:
        return f"{name} is in the wrong partition"
    taken = TakenTrajectory(
        trajectory=name,
        attempt=entry.attempt,
        incarnation=record.incarnation,
        partition=entry.partition,
        offset=entry.offset,
        sha256=entry.sha256,
    )
    result = Result(taken=taken, reward=entry.reward)
    end_sample(state, name, result, error=entry.error)
    return ""


def _request_released(state: State, offset: int, record: RequestReleased) -> str:
    if state.worker_of(record.worker, record.incarnation) is None:
        return ""
    name = record.trajectory
    request = _present(state, record, name, record.attempt)
    if request is None:
        return ""
    if request.moving is None:
        return f"{name} was released without a move"
    if record.resume is not None:
        note_progress(state, name, record.resume)
    release(state, name, record.kv)
    return ""


def _request_failed(state: State, offset: int, record: RequestFailed) -> str:
    if state.worker_of(record.worker, record.incarnation) is None:
        return ""
    if _present(state, record, record.trajectory, record.attempt) is None:
        return ""
    error = f"{record.error}: {record.message}"
    if record.retryable:
        if record.error == REPLAY_DIFFERS:
            state.requests[record.trajectory].resume = None
        fault(state, record.trajectory, error)
    else:
        fail_sample(state, record.trajectory, error)
    return ""


def _group_scored(state: State, offset: int, record: GroupScored) -> str:
    if state.worker_of(record.worker, record.incarnation) is None:
        return ""
    scoring = state.scoring.get(record.group)
    asked = (record.attempt, record.worker, record.incarnation)
    if scoring is None or (scoring.attempt, scoring.worker, scoring.incarnation) != asked:
        return ""
    group = state.groups[record.group]
    if record.error:
        fault_scoring(state, group, record.error, retryable=record.retryable)
        return ""
    why = answer_error(group, record)
    if not why:
        end_scoring(state, group, {sample.trajectory: sample.reward for sample in record.samples})
    return why


def _present(
    state: State,
    record: TrajectoriesLogged | RequestFailed | RequestReleased,
    trajectory: str,
    attempt: int,
) -> Request | None:
    """Return the writer's open request, if it has one."""
    request = state.requests.get(trajectory)
    scheduled = (attempt, record.worker, record.incarnation)
    if request is not None and request.group in state.redundant:
        request = None  # The next decision ends it.
    if request is None or (request.attempt, request.worker, request.incarnation) != scheduled:
        return None
    return request


def step_committed(state: State, offset: int, record: StepCommitted) -> str:
    """Commit step t; the batch must be the one taken."""
    training = state.training
    why = _not_of(state, record.step, record.attempt, record.incarnation)
    if why or training is None:
        return why
    if not training.digest == record.batch_digest == _digest(record):
        return f"the batch of step {record.step} differs from the batch taken"
    if record.digest_before != state.policies[state.version]:
        return f"step {record.step} started from other weights than version {state.version}"
    if record.policy.digest != record.digest_after:
        return f"the manifest of step {record.step} belongs to other weights"
    state.training = None
    state.attempt = 1
    state.eval_row = 0
    trained = [state.groups[group] for group in training.groups]
    new_version(state, record.digest_after)
    for group in trained:
        forget(state, group)
    outcomes = state.counters.outcomes
    outcomes["trained"] = outcomes.get("trained", 0) + len(trained)
    return ""


def batch_refused(state: State, offset: int, record: BatchRefused) -> str:
    """Fail the offending groups; return the others to U."""
    training = state.training
    why = _not_of(state, record.step, record.attempt, record.incarnation)
    if why or training is None:
        return why
    offenders = {offender.group: offender for offender in record.offenders}
    if not offenders:
        return "a refusal names no offender"
    if not offenders.keys() <= set(training.groups):
        return "the batch does not contain an offender"
    end_training(state, training)
    for name in training.groups:
        group = state.groups[name]
        if name in offenders:
            offender = offenders[name]
            why = f"unreadable: {offender.reason}"
            verdict = Verdict(outcome="failed", why=why, error=why, trajectory=offender.trajectory)
            set_ending(state, group, verdict)
        else:
            return_to_u(state, group)
    return ""


def adopted(state: State, offset: int, record: WeightsAdopted) -> str:
    """Check the incarnation only."""
    if record.incarnation != state.trainer_incarnation:
        return f"incarnation {record.incarnation} is not the trainer's"
    return ""


def versions_dropped(state: State, offset: int, record: VersionsDropped) -> str:
    """Check that no dropped version is in use."""
    used = sorted({state.version, *pinned(state)}.intersection(record.versions))
    return f"version {used[0]} is in use" if used else ""


def _not_of(state: State, step: int, attempt: int, incarnation: int) -> str:
    if incarnation != state.trainer_incarnation:
        return f"incarnation {incarnation} is not the trainer's, {state.trainer_incarnation} is"
    training = state.training
    if training is None:
        return f"no batch is in training, got step {step}"
    if (step, attempt) != (training.step, training.attempt):
        return f"(step {step}, attempt {attempt}) is not in training"
    return ""


def _digest(record: StepCommitted) -> str:
    try:
        return batch_digest(record.groups)
    except SchemaError:
        return ""


_APPLY: Final[dict[type[Any], Callable[[State, int, Any], str]]] = {
    RunStarted: _run_started,
    RoleStarted: _role_started,
    WorkerJoined: _worker_joined,
    WorkerReady: _worker_ready,
    WorkerLeft: _worker_left,
    TrajectoriesLogged: _trajectories_logged,
    RequestReleased: _request_released,
    RequestFailed: _request_failed,
    GroupScored: _group_scored,
    StepCommitted: step_committed,
    BatchRefused: batch_refused,
    Command: apply_command,
    WeightsAdopted: adopted,
    VersionsDropped: versions_dropped,
}
