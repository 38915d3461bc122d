"""Control records: events of a run, one JSON object each, tagged by `kind`.

A worker's incarnation is the offset of its `worker-joined`. `at_ns` is the writer's Unix time in
ns; no decision uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from dora_pipe.core.errors import InvariantBroken
from dora_pipe.schemas.identity import group_of
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.wire import Unknown, canonical, decode_tagged, kebab, kinds_of, sha256_hex

ExclusiveRole = Literal["orchestrator", "trainer"]
FinishReason = Literal["stop", "length", "environment", "error"]
"""End of a trajectory: stop token or string, token limit, environment done, error."""

ERROR_CHARACTERS_MAX = 200
"""Maximum characters of a trajectory's error in control; its record has more."""

INFRASTRUCTURE: Final = ("Retry", "TimedOut", "EpisodeTimeout", "ProcessDied", "EpisodeLost")
"""Error classes unrelated to the task's code or data: unreachable services, timeouts, dead
processes."""

REPLAY_DIFFERS: Final = "ReplayDiffers"
"""Error of a request whose environment did not replay as declared; it restarts from its prompt."""

Fault = Literal["infrastructure", "answer", "code"]
"""Origin of an error: the task's infrastructure, code without a valid answer, or code
that raised."""

FAULTS: Final[tuple[Fault, ...]] = ("infrastructure", "answer", "code")

PARTS_MAX: Final = 16
"""Maximum reward parts copied to control; the trajectory's record has all."""

PART_CHARACTERS_MAX: Final = 64
"""Maximum characters of a copied part's name."""


def error_class(error: str) -> str:
    """Return the error's class: ``error_class("not scored: TimedOut: timed out after 10 s") ==
    "TimedOut"``."""
    return error.removeprefix("not scored: ").partition(":")[0]


def fault_of(name: str) -> Fault:
    """Return the origin of an error class: ``fault_of("TimedOut") == "infrastructure"``."""
    if name in INFRASTRUCTURE:
        return "infrastructure"
    return "answer" if name == "NoAnswer" else "code"


def by_fault(errors: Mapping[str, int]) -> dict[Fault, dict[str, int]]:
    """Group error counts by origin."""
    return {
        fault: {name: count for name, count in errors.items() if fault_of(name) == fault}
        for fault in FAULTS
    }


def parts_in_control(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts copied to control: the first ones by name, with short names."""
    short = sorted(name for name in parts if len(name) <= PART_CHARACTERS_MAX)[:PARTS_MAX]
    return {name: value for name, value in parts.items() if name in short}


class Control(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=kebab, omit_defaults=True
):
    """Base of control records."""

    at_ns: int


class Lineage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Origin of a run's initial weights: `run --from RUN@STEP`."""

    run: str
    step: int
    digest: str
    optimizer: Blob | None = None
    """Optimizer state for the first step (`--with-optimizer`); None: a fresh one."""


class DataSet(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of a data set."""

    digest: str
    """sha256 (hex) over the rows as canonical JSON, one per line."""
    rows: int


class RunStarted(Control, frozen=True, kw_only=True):
    """First record of a run, with everything that never changes."""

    run: str
    schema_version: int
    config: dict[str, Any]
    """Resolved configuration."""
    config_digest: str
    dataset_digest: str
    dataset_rows: int
    eval_digest: str
    eval_rows: int
    seed: int
    policy: Manifest
    """Weights of version 0."""
    assets_digest: str
    """sha256 over config and tokenizer files of the model directory."""
    planner: str
    package: str
    lineage: Lineage | None = None
    datasets: dict[str, DataSet] = {}
    """Data set of each named task and evaluation, by source; then the four fields above describe
    the first task and evaluation."""
    scored_together: tuple[str, ...] = ()
    """Sources whose groups are also scored together."""

    @property
    def optimizer(self) -> Blob | None:
        """Return version 0's optimizer state; None: a fresh one."""
        return None if self.lineage is None else self.lineage.optimizer

    def data(self, source: str) -> DataSet | None:
        """Return the rows of a source, None if unknown."""
        plain = {
            "train": DataSet(digest=self.dataset_digest, rows=self.dataset_rows),
            "eval": DataSet(digest=self.eval_digest, rows=self.eval_rows),
        }
        return self.datasets.get(source) or plain.get(source)

    def check_config(self) -> None:
        """Raises InvariantBroken if the configuration does not match its digest."""
        digest = config_digest(self.config)
        if digest != self.config_digest:
            raise InvariantBroken(
                f"the configuration in `run started` of {self.run} was changed: its sha256 is "
                f"{digest}, logged is {self.config_digest}",
                hint="`dora-pipe audit` says what else does not hold",
            )


def config_digest(config: Mapping[str, Any]) -> str:
    """Return the hex sha256 of a configuration as canonical JSON."""
    return sha256_hex(canonical(config))


class RoleStarted(Control, frozen=True, kw_only=True):
    """Start of an exclusive role's next incarnation, which has fenced its predecessor."""

    role: ExclusiveRole
    incarnation: int
    instance: str
    host: str
    pid: int
    package: str
    samplers: dict[str, str] = {}
    """Row samplers (`task.sampler`) of an orchestrator, with the sha256 of their files."""


class WorkerJoined(Control, frozen=True, kw_only=True):
    """Start of a worker without weights; the record's offset identifies its incarnation."""

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
    max_resident_versions: int = 1
    """Versions that it can serve at once; more than one only for adapters on a shared base."""
    template_digest: str = ""
    """Digest of chat template and turn parsing; empty: prompts are text."""
    packages: dict[str, str] = {}
    """Packages and external servers of its tasks: name, version and source digest."""
    colocated: bool = False
    """Whether it shares GPUs with the trainer and sleeps during training steps."""
    reward_digests: dict[str, str] = {}
    """Reward digest per source, if there are several tasks."""


class WorkerReady(Control, frozen=True, kw_only=True):
    """Loaded and verified weights of an assigned version; with version -1 and no digest the worker
    sleeps."""

    worker: str
    incarnation: int
    version: int
    digest: str
    load_ms: float


class Resume(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Offset of a request's newest progress record, and the sampled tokens up to it."""

    tokens: int
    partition: int
    offset: int


RUN_STOPPED = "the run stopped"
"""Prefix of the reason of a worker that leaves by decision."""


class WorkerLeft(Control, frozen=True, kw_only=True):
    """Orderly stop of a worker; its open requests resume elsewhere from their progress records."""

    worker: str
    incarnation: int
    reason: str
    progress: dict[str, Resume] = {}
    """Newest progress record by trajectory id."""


class LoggedEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry of `trajectories-logged`, which has the version."""

    trajectory: str
    attempt: int
    partition: int
    offset: int
    sha256: str
    bytes: int
    tokens: int
    reward: float | None
    """None exactly if the trajectory is invalid."""
    finish: FinishReason
    error: str = ""
    """`meta.reward_error` of its record in one line, at most 200 characters."""
    tool_error: str = ""
    """First exception of a tool function, in the same form; the trajectory may be valid."""
    answer: str = ""
    """Answer that the reward read."""
    parts: dict[str, float] = {}
    """First 16 reward parts by name, with names of at most 64 characters."""
    contexts: int = 1
    """Contexts in its record."""
    calls: int = 0
    """Agent's calls in its record."""


class TrajectoryLogged(msgspec.Struct, frozen=True, kw_only=True):
    """Logged trajectory: an entry with the fields shared by its record."""

    at_ns: int
    worker: str
    incarnation: int
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
        return group_of(self.trajectory)

    @property
    def valid(self) -> bool:
        return self.reward is not None


class TrajectoriesLogged(Control, frozen=True, kw_only=True):
    """Logged trajectories of one version, each at (partition, offset).

    Workers write one record per loop turn, because a record costs as much as ten entries. Each
    entry is judged independently.
    """

    worker: str
    incarnation: int
    version: int
    digest: str
    trajectories: tuple[LoggedEntry, ...]

    def facts(self) -> list[TrajectoryLogged]:
        """Return the entries as separate events, in order."""
        shared = {
            name: getattr(self, name)
            for name in ("at_ns", "worker", "incarnation", "version", "digest")
        }
        return [
            TrajectoryLogged(**shared, **msgspec.structs.asdict(trajectory))
            for trajectory in self.trajectories
        ]


class RequestReleased(Control, frozen=True, kw_only=True):
    """Answer to a `migrate`: the worker released a request, which continues elsewhere.

    `resume` covers every token sampled here; None for a request that never ran.
    """

    worker: str
    incarnation: int
    trajectory: str
    attempt: int
    resume: Resume | None = None
    kv: Blob | None = None
    """KV cache of all tokens but the last, in the worker's handover directory."""
    left_ns: int = 0
    """When it left its slot; 0 if it had none."""


class RequestFailed(Control, frozen=True, kw_only=True):
    """Request that ended without a trajectory; retryable ones are scheduled again."""

    worker: str
    incarnation: int
    trajectory: str
    attempt: int
    error: str
    message: str
    retryable: bool


class TakenTrajectory(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Trajectory of a batch: position and digest of its record."""

    trajectory: str
    attempt: int
    incarnation: int
    partition: int
    offset: int
    sha256: str


class ScoredSample(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Trajectory in a `group-scored`."""

    trajectory: str
    reward: float
    """Final reward: the record's plus the group's scores."""
    parts: dict[str, float] = {}
    """Scores by name, in addition to the record's."""


class GroupScored(Control, frozen=True, kw_only=True):
    """Answer to a `score-group`: scores of a group's trajectories, or an error."""

    worker: str
    incarnation: int
    group: str
    attempt: int
    samples: tuple[ScoredSample, ...] = ()
    """Trajectories of the decision, in order; empty on an error."""
    error: str = ""
    """Reason for missing scores: class and first line."""
    retryable: bool = False
    """Whether another attempt may succeed; attempts are limited."""


class TakenGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Group of a batch with all its logged trajectories in order."""

    group: str
    version: int
    deadline: int
    trajectories: tuple[TakenTrajectory, ...]
    rewards: dict[str, float] = {}
    """Rewards of valid trajectories by id, if scored together."""


class StepCommitted(Control, frozen=True, kw_only=True):
    """Commit: training step `step` turned version `step` into version `step + 1`."""

    step: int
    attempt: int
    incarnation: int
    groups: tuple[TakenGroup, ...]
    batch_digest: str
    digest_before: str
    digest_after: str
    policy: Manifest
    contributions: Blob
    metrics: dict[str, float]
    """Finite values such as loss, grad_norm, tokens, kl."""
    settings: dict[str, float | int | str | bool]
    """Logged configuration keys in force, such as `trainer.learning_rate`."""
    numerics: dict[str, str]
    """Fingerprint: equal fingerprints promise equal bits."""
    decisions_next: int
    """Offset in decisions from which a restarted trainer continues."""
    compute_s: float
    checkpoint: Blob | None = None
    """Optimizer state after this step, if kept."""
    adopted: bool = False
    """Whether the previous weights were adopted instead of replayed (`--adopt`)."""
    dropped: tuple[int, ...] = ()
    """Versions whose files the trainer deletes once this commit is durable."""
    parts: tuple[int, ...] = ()
    """Sizes of all parts but the last."""
    early_s: tuple[float, ...] = ()
    """Seconds spent on each part before its batch, while the trainer was otherwise idle."""
    full: bool = True
    """Whether the store has a full checkpoint of the new version."""
    delta: Blob | None = None
    """Delta from the previous version, if any."""
    overlap_s: float = 0.0
    """Seconds spent on the first part while the previous version was published.

    Included neither in `early_s` nor in the time since the previous commit.
    """


class Offender(msgspec.Struct, frozen=True, kw_only=True):
    """Reason for rejecting a group of a batch."""

    group: str
    trajectory: str
    reason: str


class BatchRefused(Control, frozen=True, kw_only=True):
    """Trainer's rejection of a batch: offenders fail, the other groups are free again."""

    step: int
    attempt: int
    incarnation: int
    offenders: tuple[Offender, ...]

    @property
    def why(self) -> str:
        """Return the offenders with their reasons."""
        pairs = ((entry.trajectory or entry.group, entry.reason) for entry in self.offenders)
        return "; ".join(f"{name}: {reason}" for name, reason in pairs)


class Command(Control, frozen=True, kw_only=True):
    """User command to a running run: set, pause, resume, drain, stop, fail-batch."""

    user: str
    verb: str
    args: dict[str, Any] = {}


class WeightsAdopted(Control, frozen=True, kw_only=True):
    """Adoption of `step`'s committed weights by a restarted trainer that could not reproduce them
    bit for bit."""

    step: int
    incarnation: int
    digest_committed: str
    digest_replayed: str
    reason: str


class VersionsDropped(Control, frozen=True, kw_only=True):
    """Deletion of a finished run's version files by `prune`; replay rebuilds them."""

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
    """Return a control record; `Unknown` for a later kind. Raises SchemaError."""
    return decode_tagged(data, _DECODER, KINDS)
