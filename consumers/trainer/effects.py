"""Effects and events of the trainer's machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dora_pipe.consumers.learners.learner import Settings
from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.consumers.trainer.commits import CommitNote
from dora_pipe.schemas.control import Offender
from dora_pipe.schemas.dead_letter import DeadLetter
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import TakeBatch, TakePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Load a checkpoint and replay up to `step`."""

    step: int
    notes: tuple[CommitNote, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBatch:
    """Find, check and decode every trajectory of a batch."""

    decision: TakeBatch
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPart:
    """Fetch, check and compute a part of the next batch."""

    decision: TakePart
    known: Known
    reference: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Train on the batch fetched last."""

    step: int
    attempt: int
    settings: Settings
    reference: str = ""
    """Weights digest of the reference, or empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """Write the files of the last trained step."""

    step: int
    attempt: int
    checkpoint: bool
    before: str = ""
    """Weights digest of the delta's base; empty without deltas."""
    full: bool = True
    """Force a full checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFiles:
    """Delete files of dropped versions; answered by no event."""

    weights: tuple[str, ...]
    optimizers: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteHistory:
    """Write a snapshot of the commits; answered by no event."""

    content: bytes


TrainerEffect = (
    Restore | TrainPart | FetchBatch | TrainStep | PublishPolicy | DropFiles | WriteHistory
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A step was replayed with equal weights."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A replay diverged; its committed weights were adopted."""

    step: int
    digest_committed: str
    digest_replayed: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """The trainer's weights are those before `step`."""

    step: int
    digest: str
    numerics: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFetched:
    """A batch was checked; trainable without offenders."""

    step: int
    attempt: int
    offenders: tuple[Offender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """A part was checked, and computed if valid."""

    step: int
    attempt: int
    part: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """A step was computed, in memory only."""

    step: int
    attempt: int
    metrics: Mapping[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished:
    """The files of a step are durable but uncommitted."""

    step: int
    attempt: int
    manifest: Manifest
    contributions: Blob
    checkpoint: Blob | None
    full: bool = True
    delta: Blob | None = None
    changed_share: float = 0.0
    """Share of the weights in the delta."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record of the trajectories topic is unreadable."""

    dead_letter: DeadLetter


TrainerEvent = (
    Replayed
    | Adopted
    | Restored
    | PartTrained
    | BatchFetched
    | StepTrained
    | PolicyPublished
    | Unreadable
)
