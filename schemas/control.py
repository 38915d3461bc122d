"""Control records: the facts of a run, one JSON object each, tagged by `kind`.

A worker's role epoch is the offset of its own `worker joined`. `at_ns` is the writer's wall clock
(ns since 1970) when the fact happened; nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.policy import Blob, Fallback, Manifest
from dora_pipe.schemas.wire import Unknown, canonical, decode_tagged, kebab, kinds_of, sha256_hex

ExclusiveRole = Literal["orchestrator", "trainer"]
FinishReason = Literal["stop", "length", "environment", "error"]
"""Why a trajectory ended: stop token or string, token limit, environment done, an error."""

ERROR_CHARACTERS_MAX = 200
"""Of the error of a trajectory in control; its own record has more of it."""

INFRASTRUCTURE: Final = ("Retry", "TimedOut", "EpisodeTimeout", "ProcessDied", "EpisodeLost")
"""Errors of a trajectory without a valid reward that say nothing of the task's code or its data: a
service that does not answer, a call that takes too long, a process that is gone."""

REPLAY_DIFFERS: Final = "ReplayDiffers"
"""Error of a request whose environment was said to be replayable, and is not: it begins again from
its prompt."""

Fault = Literal["infrastructure", "answer", "code"]
"""Whose an error is: what runs the task's; that of code which gave no valid answer; or of code that
raised."""

FAULTS: Final[tuple[Fault, ...]] = ("infrastructure", "answer", "code")

PARTS_MAX: Final = 16
"""Parts of a reward that control repeats; the trajectory's own record has all."""

PART_CHARACTERS_MAX: Final = 64
"""Of the name of a part that control repeats."""


def error_class(error: str) -> str:
    """``error_class("not scored: TimedOut: timed out after 10 s") == "TimedOut"``."""
    return error.removeprefix("not scored: ").partition(":")[0]


def fault_of(name: str) -> Fault:
    """Of a class of errors. ``fault_of("TimedOut") == "infrastructure"``."""
    if name in INFRASTRUCTURE:
        return "infrastructure"
    return "answer" if name == "NoAnswer" else "code"


def by_fault(errors: Mapping[str, int]) -> dict[Fault, dict[str, int]]:
    """Counts of classes of errors, under every fault."""
    return {
        fault: {name: count for name, count in errors.items() if fault_of(name) == fault}
        for fault in FAULTS
    }


def parts_in_control(parts: Mapping[str, float]) -> dict[str, float]:
    """Those of a record's parts that control repeats: with short names, the first ones by name."""
    short = sorted(name for name in parts if len(name) <= PART_CHARACTERS_MAX)[:PARTS_MAX]
    return {name: value for name, value in parts.items() if name in short}


class Control(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab, omit_defaults=True
):
    """Base of the control records."""

    at_ns: int


class Lineage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Where a run's initial weights came from: `run --from RUN@STEP`."""

    run: str
    step: int
    digest: str
    optimizer: Blob | None = None
    """The optimizer's state of that version, which this run's first step goes on with
    (`--with-optimizer`); none: a fresh one."""


class DataSet(msgspec.Struct, frozen=True, kw_only=True):
    """The rows that groups are made of."""

    digest: str
    """sha256 over the rows as canonical JSON, a line each (hex)."""
    rows: int
    """How many."""


class RunStarted(Control, frozen=True, kw_only=True):
    """The first record of a run: everything that stays the same while it lasts."""

    run: str
    schema_version: int
    config: dict[str, Any]
    """The resolved configuration (`dora_pipe.config.Config` as plain values)."""
    config_digest: str
    dataset_digest: str
    dataset_rows: int
    eval_digest: str
    eval_rows: int
    seed: int
    policy: Manifest
    """Version 0."""
    assets_digest: str
    """sha256 over config and tokenizer files of the model directory."""
    planner: str
    package: str
    lineage: Lineage | None = None
    datasets: dict[str, DataSet] = {}
    """Of every task and evaluation that has a name, as `GroupSpec.source` says it; then the four
    fields above are those of the first task and of the first evaluation."""
    scored_together: tuple[str, ...] = ()
    """Sources (`GroupSpec.source`) of groups whose siblings are also scored together."""

    @property
    def optimizer(self) -> Blob | None:
        """The optimizer's state that version 0 begins with; None: a fresh one."""
        return None if self.lineage is None else self.lineage.optimizer

    def data(self, source: str) -> DataSet | None:
        """The rows of a source; None where there is no such one."""
        plain = {
            "train": DataSet(digest=self.dataset_digest, rows=self.dataset_rows),
            "eval": DataSet(digest=self.eval_digest, rows=self.eval_rows),
        }
        return self.datasets.get(source) or plain.get(source)

    def check_config(self) -> None:
        """What every role asks before it obeys it. Raises InvariantBroken."""
        found = config_digest(self.config)
        if found != self.config_digest:
            raise InvariantBroken(
                f"the configuration in `run started` of {self.run} was changed: its sha256 is "
                f"{found}, logged is {self.config_digest}",
                hint="`dora-pipe audit` says what else does not hold",
            )


def config_digest(config: Mapping[str, Any]) -> str:
    """Hex sha256 of a configuration's plain values as canonical JSON."""
    return sha256_hex(canonical(config))


class RoleStarted(Control, frozen=True, kw_only=True):
    """An exclusive role has fenced its predecessor: its next incarnation begins."""

    role: ExclusiveRole
    role_epoch: int
    instance: str
    host: str
    pid: int
    package: str
    samplers: dict[str, str] = {}
    """Of an orchestrator that draws rows (`task.sampler`): each function as it is configured, with
    the sha256 of the file it is in."""


class WorkerJoined(Control, frozen=True, kw_only=True):
    """A worker is there and hosts nothing yet. The offset of this record names its incarnation."""

    worker: str
    instance: str
    host: str
    pid: int
    slots: int
    prefetch: int
    kv_tokens: int
    engine: str
    engine_version: str
    dtype: str
    device: str
    declares: tuple[str, ...]
    assets_digest: str
    reward_digest: str
    package: str
    versions_resident: int = 1
    """Versions that it can host at the same time; more than one only where a version is an adapter
    on weights that all share."""
    template_digest: str = ""
    """Of how messages become token ids and turns are read; empty: its prompts are text."""
    packages: dict[str, str] = {}
    """Packages and servers of others that its tasks play with: by name, version and a digest of the
    source."""
    elastic: bool = False
    """It shares its GPUs with the trainer in time: it sleeps while a step is computed."""
    reward_digests: dict[str, str] = {}
    """Of several tasks that of each by itself, by source (`GroupSpec.source`)."""


class WorkerReady(Control, frozen=True, kw_only=True):
    """A worker has loaded the weights it was assigned; their digest was checked. Or, with version
    -1 and no digest, it sleeps: it has let go of its weights, and nothing that it has needs them.
    """

    worker: str
    epoch: int
    version: int
    digest: str
    load_ms: float
    fallbacks: tuple[Fallback, ...] = ()
    """Files of versions that were lost or damaged on the way to these weights; the last few."""


class Resume(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Where a request's newest progress record lies, and how many sampled tokens it reaches."""

    tokens: int
    partition: int
    offset: int


RUN_STOPPED = "the run stopped"
"""How the reason of a worker begins that leaves because a decision said so."""


class WorkerLeft(Control, frozen=True, kw_only=True):
    """A worker stops in order; its open requests go on elsewhere from their progress records."""

    worker: str
    epoch: int
    reason: str
    progress: dict[str, Resume] = {}
    """Trajectory id to its newest progress record."""


class LoggedEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One trajectory of a `trajectories logged` record; its version is the record's."""

    trajectory: str
    attempt: int
    partition: int
    offset: int
    sha256: str
    bytes: int
    tokens: int
    """Sampled tokens."""
    reward: float | None
    """None exactly when the trajectory is not valid."""
    finish: FinishReason
    error: str = ""
    """Why it is not valid: class and first line, at most `ERROR_CHARACTERS_MAX` characters."""
    tool_error: str = ""
    """What the function of a tool raised first, likewise; the trajectory may be valid."""
    answer: str = ""
    """What its reward read as its answer, as its record has it; empty where none said one."""
    parts: dict[str, float] = {}
    """What its reward is made of: of its record's parts with names of at most 64 characters the
    first 16 by name."""
    contexts: int = 1
    """How many its record has."""
    calls: int = 0
    """Of an agent to the model, that its record has."""


class TrajectoryLogged(msgspec.Struct, frozen=True, kw_only=True):
    """The fact that a trajectory lies in the log: an entry with what its record says of all."""

    at_ns: int
    worker: str
    epoch: int
    version: int
    digest: str
    trajectory: str
    attempt: int
    partition: int
    offset: int
    sha256: str
    bytes: int
    tokens: int
    reward: float | None
    finish: FinishReason
    error: str
    tool_error: str = ""
    answer: str = ""
    parts: dict[str, float] = {}
    contexts: int = 1
    calls: int = 0

    @property
    def group(self) -> str:
        """Id of its group."""
        return group_of(self.trajectory)

    @property
    def valid(self) -> bool:
        """Whether its reward counts."""
        return self.reward is not None


class TrajectoriesLogged(Control, frozen=True, kw_only=True):
    """Trajectories of one version lie in the log, each at its (partition, offset).

    A worker reports once per turn of its loop, not once per trajectory: a record costs about as
    much as ten entries. Each entry is judged by itself.
    """

    worker: str
    epoch: int
    version: int
    digest: str
    """Weights digest (hex)."""
    trajectories: tuple[LoggedEntry, ...]
    """At least one."""

    def facts(self) -> list[TrajectoryLogged]:
        """Every entry as a fact of its own, in order."""
        return [
            TrajectoryLogged(
                at_ns=self.at_ns,
                worker=self.worker,
                epoch=self.epoch,
                version=self.version,
                digest=self.digest,
                trajectory=one.trajectory,
                attempt=one.attempt,
                partition=one.partition,
                offset=one.offset,
                sha256=one.sha256,
                bytes=one.bytes,
                tokens=one.tokens,
                reward=one.reward,
                finish=one.finish,
                error=one.error,
                tool_error=one.tool_error,
                answer=one.answer,
                parts=one.parts,
                contexts=one.contexts,
                calls=one.calls,
            )
            for one in self.trajectories
        ]


class RequestReleased(Control, frozen=True, kw_only=True):
    """A worker has let go of a request, as a `move` asked: it goes on elsewhere.

    `resume` reaches every token that was sampled here; None for a request that never ran.
    """

    worker: str
    epoch: int
    trajectory: str
    attempt: int
    resume: Resume | None = None
    kv: Blob | None = None
    """The KV cache of all tokens but the last, in the worker's handover directory."""
    left_ns: int = 0
    """When it left its slot; 0 for a request that had none."""


class RequestFailed(Control, frozen=True, kw_only=True):
    """A request ended without a trajectory; a retryable one is placed again, boundedly often."""

    worker: str
    epoch: int
    trajectory: str
    attempt: int
    error: str
    message: str
    retryable: bool


class TakenTrajectory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One trajectory of a batch: which record of the log, down to its bytes."""

    trajectory: str
    attempt: int
    epoch: int
    partition: int
    offset: int
    sha256: str


class ScoredSibling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One sibling of a `group scored`."""

    trajectory: str
    reward: float
    """What counts from now on: that of its record and what the group's scores add."""
    parts: dict[str, float] = {}
    """Scores by name, beside those of its record."""


class GroupScored(Control, frozen=True, kw_only=True):
    """The siblings of a group were scored together, as a `score group` asked; or were not."""

    worker: str
    epoch: int
    group: str
    attempt: int
    """That of the decision."""
    siblings: tuple[ScoredSibling, ...] = ()
    """Those of the decision, in order; none where there is an error."""
    error: str = ""
    """Why there are no scores: class and first line."""
    retryable: bool = False
    """Asked again, the answer may be another one; boundedly often."""


class TakenGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One group of a batch, with all its logged siblings in order."""

    group: str
    version: int
    deadline: int
    trajectories: tuple[TakenTrajectory, ...]
    rewards: dict[str, float] = {}
    """Of its valid trajectories, by id, where they were scored together: they take the place of the
    records' own."""


class StepCommitted(Control, frozen=True, kw_only=True):
    """The commit: training step `step` is done, version `step` became version `step + 1`."""

    step: int
    attempt: int
    role_epoch: int
    groups: tuple[TakenGroup, ...]
    batch_digest: str
    digest_before: str
    digest_after: str
    policy: Manifest
    contributions: Blob
    """Arrow file: per trajectory its staleness, advantage, ratio figures, clipped share."""
    figures: dict[str, float]
    """loss, grad_norm, tokens, kl, ...; all finite."""
    settings: dict[str, float | int | str | bool]
    """The logged configuration keys that were in force (see `TakeBatch.settings`)."""
    numerics: dict[str, str]
    """Fingerprint: equal bits are promised under an equal one."""
    decisions_next: int
    """Position in the decisions topic from which a restarted trainer goes on."""
    compute_s: float
    checkpoint: Blob | None = None
    """Optimizer state after this step, where one was kept."""
    adopted: bool = False
    """The weights before this step were adopted, not replayed (`--adopt`)."""
    dropped: tuple[int, ...] = ()
    """Versions whose files the trainer deletes once this commit is durable (docs/storage.md)."""
    parts: tuple[int, ...] = ()
    """The sizes of all but its last part, as `TakeBatch.parts` has them."""
    ahead_s: tuple[float, ...] = ()
    """Seconds spent on the first of those parts ahead of the batch, while nothing else could be
    done: no wait for it. The others were computed with the batch."""
    whole: bool = True
    """Whether the new version lies in the store as a whole file."""
    patch: Blob | None = None
    """The file that makes the new version of the one before it, where there is one."""
    beside_s: float = 0.0
    """Seconds spent on its first part while the version before was published: none of `ahead_s`,
    nor of the time from the commit before to this one."""
    fallbacks: tuple[Fallback, ...] = ()
    """Files of versions that were lost or damaged where the trainer read them, since it started or
    since its commit before; the last few."""


class Offender(msgspec.Struct, frozen=True, kw_only=True):
    """Why a group of a batch cannot be accepted."""

    group: str
    trajectory: str
    why: str


class BatchRefused(Control, frozen=True, kw_only=True):
    """The trainer refuses a batch decision; the offenders fail, the other groups return to U."""

    step: int
    attempt: int
    role_epoch: int
    offenders: tuple[Offender, ...]


class Command(Control, frozen=True, kw_only=True):
    """What a user asks of a running run. Verbs: set, pause, resume, drain, stop, fail-batch."""

    user: str
    verb: str
    args: dict[str, Any] = {}


class WeightsAdopted(Control, frozen=True, kw_only=True):
    """A restarted trainer could not reproduce `step` bit for bit and took its committed weights."""

    step: int
    role_epoch: int
    digest_committed: str
    digest_replayed: str
    why: str


class VersionsDropped(Control, frozen=True, kw_only=True):
    """`prune` deletes files of these versions of a finished run; replay makes them again."""

    user: str
    versions: tuple[int, ...]


AnyControl = (
    RunStarted
    | RoleStarted
    | WorkerJoined
    | WorkerReady
    | WorkerLeft
    | TrajectoriesLogged
    | RequestReleased
    | RequestFailed
    | GroupScored
    | StepCommitted
    | BatchRefused
    | Command
    | WeightsAdopted
    | VersionsDropped
)

_DECODER = msgspec.json.Decoder(AnyControl)
KINDS = kinds_of(AnyControl)


def decode_control(data: bytes) -> AnyControl | Unknown:
    """A control record; `Unknown` for a kind of a later version. Raises SchemaError."""
    return decode_tagged(data, _DECODER, KINDS)
