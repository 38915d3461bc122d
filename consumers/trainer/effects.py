"""Effects that the trainer's machine requests, and the events that answer them."""

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
    """Restore the weights before `step`: load a checkpoint, then replay committed steps."""

    step: int
    notes: tuple[CommitNote, ...]
    """Notes of steps 0 to `step` - 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchBatch:
    """Find, check and decode every trajectory of a batch."""

    decision: TakeBatch
    known: Known


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPart:
    """Find, check and decode the trajectories of a part of the next batch, and compute its
    gradient. Errors are left to the batch.
    """

    decision: TakePart
    known: Known
    reference: str = ""
    """See `TrainStep`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Train on the batch fetched last."""

    step: int
    attempt: int
    settings: Settings
    reference: str = ""
    """Weights digest of the reference version in the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishPolicy:
    """Write the files of the step trained last."""

    step: int
    attempt: int
    checkpoint: bool
    """True to save the optimizer state."""
    before: str = ""
    """Weights digest of the delta's base; empty if deltas are off."""
    whole: bool = True
    """True to store the full checkpoint in any case."""


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
    """A committed step was replayed with equal bytes."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """Replay of a committed step diverged; the committed weights were adopted."""

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
    """A batch was fetched and checked; trainable if it has no offenders."""

    step: int
    attempt: int
    offenders: tuple[Offender, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTrained:
    """A part was checked, and computed if it had no error."""

    step: int
    attempt: int
    part: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrained:
    """A step was computed; its weights are only in memory."""

    step: int
    attempt: int
    figures: Mapping[str, float]
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyPublished:
    """The files of a step are durable, but no commit names them yet."""

    step: int
    attempt: int
    manifest: Manifest
    contributions: Blob
    checkpoint: Blob | None
    whole: bool = True
    patch: Blob | None = None
    changed_share: float = 0.0
    """Share of the weights in the delta."""
    fallbacks: tuple[Fallback, ...] = ()
    """Files of versions that this incarnation found lost or damaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """A record of the trajectories topic is unreadable."""

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
