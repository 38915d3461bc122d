"""What the trainer's machine wants done, and what it hears back; it decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dora_pipe.consumers.learners.port import Settings
from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.consumers.trainer.commits import CommitNote
from dora_pipe.schemas.control import Offender
from dora_pipe.schemas.dead_letter import DeadLetter
from dora_pipe.schemas.policy import Blob, Fallback, Manifest
from dora_pipe.schemas.rounds import TakeBatch, TakePart


@dataclass(frozen=True, slots=True, kw_only=True)
class Restore:
    """Bring the trainer to where `step` is the next one: a checkpoint, then committed steps."""

    step: int
    notes: tuple[CommitNote, ...]
    """Of the steps 0 to `step` - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBatch:
    """Find, check and decode every trajectory of a batch."""

    decision: TakeBatch
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPart:
    """Find, check and decode every trajectory of a part of the next batch, and compute its
    gradient. What cannot be is left to the batch."""

    decision: TakePart
    known: Known
    reference: str = ""
    """As of `TrainStep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Train on the batch that was fetched last."""

    step: int
    attempt: int
    settings: Settings
    reference: str = ""
    """Weights digest of the version that the settings name as the reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """Write the files of the step that was trained last."""

    step: int
    attempt: int
    checkpoint: bool
    """Whether to keep the optimizer state."""
    before: str = ""
    """Weights digest of the version that a patch is to be made of; empty: there are no patches."""
    whole: bool = True
    """Whether the version is stored whole in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropFiles:
    """Delete files of versions that a durable commit has dropped. No event follows."""

    weights: tuple[str, ...]
    """Weights digests."""
    optimizers: tuple[str, ...]
    """sha256 of optimizer states."""


Effect = Restore | TrainPart | FetchBatch | TrainStep | PublishPolicy | DropFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A committed step was trained again on the way to `Restored`, with equal bytes."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """A committed step gave other bytes here; its committed weights were taken instead."""

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
    """A batch was looked at; without offenders it is ready to be trained."""

    step: int
    attempt: int
    offenders: tuple[Offender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """A part was looked at, and computed where nothing was wrong with it."""

    step: int
    attempt: int
    part: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """A step was computed; its weights lie in the trainer's memory only."""

    step: int
    attempt: int
    figures: Mapping[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished:
    """The files of a step are durable; nothing names them yet."""

    step: int
    attempt: int
    manifest: Manifest
    contributions: Blob
    checkpoint: Blob | None
    whole: bool = True
    patch: Blob | None = None
    changed_share: float = 0.0
    """Of the weights, those that the patch has."""
    fallbacks: tuple[Fallback, ...] = ()
    """Files of versions that were lost or damaged where this incarnation read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record of the trajectories topic could not be read."""

    dead_letter: DeadLetter


Event = (
    Replayed
    | Adopted
    | Restored
    | PartTrained
    | BatchFetched
    | StepTrained
    | PolicyPublished
    | Unreadable
)
