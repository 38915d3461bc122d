"""Rounds of the orchestrator: records read, observations and decisions, one JSON object each.

State is a fold of rounds: apply the control records with offset < `control_next`, then
observations, then decisions. Workers and trainer need only the decisions.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.schemas.control import Resume, TakenGroup, TakenTrajectory
from dora_pipe.schemas.identity import Purpose, source_of, trajectory_id
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.wire import decode, encode, kebab, sha256_hex

Outcome = Literal["trained", "filtered", "failed", "cancelled", "evaluated"]
"""Outcome of a group; open until then. `trained` comes from the commit."""

GENESIS_CHAIN = "0" * 64
"""Chain before the first round."""

SampleOutcome = Literal["redundant", "expired"]
"""Outcome of a trajectory that its group does not wait for: enough others were valid, or the group
timed out. Neither is a failure."""

NO_VERSION: Final = -1
"""Version of a worker without weights. Assigning it puts a worker to sleep."""

STATE_DIGEST_EVERY = 64
"""Rounds between state digests; the last round has one too."""


class Observation(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab):
    """Base of observations: state input from metrics and time."""


class LeaseExpired(Observation, frozen=True, kw_only=True):
    """No message from this incarnation during its lease."""

    worker: str
    incarnation: int


class Progressed(Observation, frozen=True, kw_only=True):
    """Progress of a request that lost its worker."""

    trajectory: str
    resume: Resume


class KvPressure(Observation, frozen=True, kw_only=True):
    """KV cache usage of a worker above the threshold."""

    worker: str
    incarnation: int
    used_tokens: int


class OffEngine(Observation, frozen=True, kw_only=True):
    """Number of a worker's requests that need no slot.

    They wait for a prompt, environment, reward or the log.
    """

    worker: str
    incarnation: int
    requests: int


class GroupExpired(Observation, frozen=True, kw_only=True):
    """Group whose generation exceeded `rollout.group_timeout_s`; it ends with its current
    trajectories."""

    group: str


class PlanPeriod(Observation, frozen=True, kw_only=True):
    """End of a planning period."""


AnyObservation = LeaseExpired | Progressed | KvPressure | OffEngine | GroupExpired | PlanPeriod


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Properties of a group, fixed at dispatch."""

    group: str
    ordinal: int
    purpose: Purpose
    version: int
    digest: str
    deadline: int
    partition: int
    dataset_digest: str
    index: int
    data_epoch: int
    seed: int
    size: int
    """Trajectories that complete it."""
    task: str = ""
    evaluation: str = ""
    redundancy: int = 0
    """Redundant trajectories beyond `size`: the first `size` valid ones count."""

    @property
    def samples(self) -> int:
        return self.size + self.redundancy

    @property
    def source(self) -> str:
        """Return the source of its data, sampling and task processes: `train`, `eval`, or with a
        name, such as `train/NAME`."""
        return source_of(self.purpose, self.evaluation if self.purpose == "eval" else self.task)


class Decision(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab, omit_defaults=True
):
    """Base of decisions, with an optional reason."""

    reason: str


class Dispatch(Decision, frozen=True, kw_only=True):
    """Admission of a group."""

    spec: GroupSpec
    skipped: tuple[int, ...] = ()
    """Rows skipped in its favor, in order: `task.max_solve_rate`."""


class ScheduledSample(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, omit_defaults=True
):
    """Trajectory of a `schedule`: attempt and progress to resume from."""

    sample: int
    attempt: int
    resume: Resume | None = None
    kv: Blob | None = None
    """KV cache left by a migration; without it the request is prefilled."""


class ScheduledRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Scheduled request: one trajectory of a `schedule` with the shared fields."""

    spec: GroupSpec
    trajectory: str
    sample: int
    attempt: int
    worker: str
    incarnation: int
    resume: Resume | None = None
    kv: Blob | None = None
    reason: str = ""


class Schedule(Decision, frozen=True, kw_only=True):
    """Assignment of a group's requests to a worker, each with an attempt number."""

    spec: GroupSpec
    worker: str
    incarnation: int
    samples: tuple[ScheduledSample, ...]

    def requests(self) -> list[ScheduledRequest]:
        """Return every request, in order."""
        return [
            ScheduledRequest(
                spec=self.spec,
                trajectory=trajectory_id(self.spec.group, sample.sample),
                sample=sample.sample,
                attempt=sample.attempt,
                worker=self.worker,
                incarnation=self.incarnation,
                resume=sample.resume,
                kv=sample.kv,
                reason=self.reason,
            )
            for sample in self.samples
        ]


class Migrate(Decision, frozen=True, kw_only=True):
    """Migration of a running request to another worker with its version.

    The worker answers with `request-released`; only then is the request scheduled on `to`, or
    queued.
    """

    trajectory: str
    attempt: int
    worker: str
    incarnation: int
    to: str
    """Target worker; empty: any free one, because this worker will sleep."""
    to_incarnation: int
    """Incarnation of `to`; -1 without one."""


class Cancel(Decision, frozen=True, kw_only=True):
    """Cancellation of a running request."""

    trajectory: str
    attempt: int
    worker: str
    incarnation: int


class Assign(Decision, frozen=True, kw_only=True):
    """Assignment of a version to a worker, which first finishes its requests.

    A worker that serves several versions adds it to the others. A colocated worker may be assigned
    none (-1, without a digest): it sleeps once it has no request.
    """

    worker: str
    incarnation: int
    version: int
    digest: str
    drop: tuple[int, ...] = ()
    """Versions that a worker with several unloads first; none of its requests uses them."""


class Drain(Decision, frozen=True, kw_only=True):
    """Order to a worker to finish its requests, accept no others, and leave."""

    worker: str
    incarnation: int


class Fence(Decision, frozen=True, kw_only=True):
    """Exclusion of a worker's incarnation: its later records do not count."""

    worker: str
    incarnation: int


class ScoreGroup(Decision, frozen=True, kw_only=True):
    """Order to a worker to score a group's trajectories together, answered by `group-scored`."""

    spec: GroupSpec
    worker: str
    incarnation: int
    attempt: int
    trajectories: tuple[TakenTrajectory, ...]
    """Trajectories with a valid reward, in order."""


class TakePart(Decision, frozen=True, kw_only=True):
    """Finished groups of the next step's incomplete batch, which lists them again."""

    step: int
    attempt: int
    part: int
    """Number from 0; replaces an earlier part of this number and all later ones."""
    groups: tuple[TakenGroup, ...]
    settings: dict[str, float | int | str | bool]
    """Settings of its batch; a change discards parts."""


class TakeBatch(Decision, frozen=True, kw_only=True):
    """Batch of a step, keyed (step, attempt), with exactly these groups."""

    step: int
    attempt: int
    groups: tuple[TakenGroup, ...]
    settings: dict[str, float | int | str | bool]
    """Logged configuration keys in force, such as `trainer.learning_rate`."""
    pins: tuple[int, ...] = ()
    """Versions of open groups, served by workers or assigned to them, sorted.

    Versions below `step` are never added later: dispatches use the newest.
    """
    parts: tuple[int, ...] = ()
    """Number of groups in each part taken before; the others are the last part.

    Gradients accumulate part by part. Empty: one part.
    """
    in_flight: float | None = None
    """In-flight limit in batches from now on, if `staleness.async_batches` is `auto`."""


class End(Decision, frozen=True, kw_only=True):
    """Outcome of a group, except `trained`."""

    group: str
    outcome: Outcome


class EndSamples(Decision, frozen=True, kw_only=True):
    """End of a group's remaining trajectories; records logged later are superseded."""

    group: str
    samples: tuple[int, ...]
    """All without a result, in order."""
    outcome: SampleOutcome


class StopRun(Decision, frozen=True, kw_only=True):
    """End of the run: no open group and no step left, or a user's stop; every role may exit."""


class Halt(Decision, frozen=True, kw_only=True):
    """Halt after too many failed training groups: no decisions until a user's `resume`.

    The orchestrator exits; open groups stay open.
    """

    error: str
    """Most frequent error: class and first line."""
    trajectory: str
    """A trajectory with that error."""


class EarlyStop(Decision, frozen=True, kw_only=True):
    """Early stop by the watched evaluation: the run ends after training the groups in flight."""

    evaluation: str
    best: int
    """Best version; -1 if no evaluation had a result."""


AnyDecision = (
    Dispatch
    | Schedule
    | Migrate
    | Cancel
    | Assign
    | Drain
    | Fence
    | ScoreGroup
    | TakePart
    | TakeBatch
    | End
    | EndSamples
    | StopRun
    | Halt
    | EarlyStop
)


class Round(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Atomic turn of the orchestrator."""

    ordinal: int
    incarnation: int
    now_ns: int
    """Time of the orchestrator, which never decreases over the rounds of a run."""
    control_next: int
    """Control records below this offset are folded, each in exactly one round."""
    observations: tuple[AnyObservation, ...] = ()
    decisions: tuple[AnyDecision, ...] = ()
    planned: bool = True
    """Whether a plan was made; not during catch-up or under load."""
    state_digest: str | None = None
    """State digest after this round, in every 64th and the last."""
    chain: str = ""


FOREIGN_HINT: Final = "was it written by a later version of dora-pipe, or by somebody else?"
_DECODER = msgspec.json.Decoder(Round)


def decode_round(data: bytes) -> Round:
    """Return a round. Raises SchemaError, also for an unknown decision, which a fold must
    not skip."""
    return decode(data, _DECODER)


class IncarnationGuard:
    """Reader of rounds that checks their order, starting at any round.

    Detects a truncated and regrown log, and foreign writers.
    """

    __slots__ = ("_incarnation", "_ordinal")

    def __init__(self) -> None:
        self._incarnation = -1
        self._ordinal: int | None = None

    def read(self, offset: int, value: bytes) -> Round | None:
        """Return the round at an offset of decisions; None from a fenced orchestrator.

        Raises SchemaError for an invalid round, InvariantBroken for a missing, duplicate or foreign
        one.
        """
        try:
            round_ = decode_round(value)
        except SchemaError as error:
            why = f"decisions offset {offset}: {error.message}"
            raise SchemaError(why, path=error.path, hint=FOREIGN_HINT) from None
        if round_.incarnation < self._incarnation:
            return None
        if self._ordinal not in (None, round_.ordinal - 1):
            raise InvariantBroken(
                f"decisions offset {offset}: round {round_.ordinal} comes after round "
                f"{self._ordinal}",
                hint="the log lost records, or somebody else writes to it; `dora-pipe audit` looks",
            )
        self._incarnation, self._ordinal = round_.incarnation, round_.ordinal
        return round_


def fold_bytes(offset: int, value: bytes) -> bytes:
    """Return a control record's contribution to the chain: offset, length, bytes."""
    return offset.to_bytes(8, "big") + len(value).to_bytes(8, "big") + value


def seal(previous: str, folded: bytes, round_: Round) -> tuple[str, bytes]:
    """Return the chain after a round, and the round's bytes with it, encoded once.

    `folded` is as in `chain_of`. The chain is a round's last field.
    """
    assert not round_.chain
    bare = encode(round_)
    chain = sha256_hex(bytes.fromhex(previous), folded, bare)
    return chain, bare[:-1] + b',"chain":"' + chain.encode() + b'"}'


def chain_of(previous: str, folded: bytes, round_: Round) -> str:
    """Return sha256(previous chain, folded control bytes, round without chain) in hex.

    `folded` concatenates `fold_bytes` of the round's control records.
    """
    bare = encode(msgspec.structs.replace(round_, chain=""))
    return sha256_hex(bytes.fromhex(previous), folded, bare)
