"""Port of a learner: a step is a function of (weights, optimizer state, batch, settings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dora_pipe.schemas.batch import parts_of
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.trajectory import Trajectory

Settings = Mapping[str, float | int | str | bool]
"""Logged keys in force, e.g. ``{"trainer.learning_rate": 3e-4}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAt:
    """Log position and value digest of a trajectory."""

    partition: int
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """Group of a batch, including invalid (masked) trajectories."""

    group: str
    version: int
    trajectories: Sequence[Trajectory]
    """Numpy arrays (NaN for None) if from a log."""
    places: Sequence[LoggedAt] = ()
    """For ranks that read their shares from the log; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """KL reference version, if it moves."""

    version: int
    digest: str
    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Batch of a step or a part; groups in dispatch order per part."""

    step: int
    groups: Sequence[TrainGroup]
    reference: Reference | None = None
    """None: version 0."""
    teacher: Mapping[str, Sequence[float]] | None = None
    """Float32 teacher log-probs of counted tokens, by trajectory."""
    parts: Sequence[int] = ()
    """Groups of each part but the last; empty if unsplit."""

    def in_parts(self) -> list[TrainBatch]:
        """Return its parts as unsplit batches."""
        parts = parts_of(self.groups, self.parts)
        return [replace(self, groups=groups, parts=()) for groups in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step; all metrics are finite."""

    metrics: Mapping[str, float]
    contributions: Sequence[Mapping[str, Any]]
    """Rows of `contributions.SCHEMA`, in batch order."""
    compute_s: float


class Learner(Protocol):
    """Training engine with weights and optimizer state."""

    name: str
    version: str

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        """Load weights and, if given, a checkpoint's optimizer state. Raises PolicyError."""
        ...

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        """Train one step. Raises NonFinite, which invalidates the state.

        Gradients of parts add up, each divided by the whole's divisor. With several
        `trainer.minibatches` each part is an update; the last takes the rest. Bit-equal with and
        without earlier `train_part` calls.
        """
        ...

    def manifest(self) -> Manifest: ...

    def save_weights(self, path: Path) -> Manifest:
        """Write the weights to a safetensors file, without fsync; return their manifest."""
        ...

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer state to a safetensors file."""
        ...

    def numerics(self) -> dict[str, str]:
        """Return the fingerprint under which results are bit-equal."""
        ...


@runtime_checkable
class LeavesDevice(Protocol):
    """Learner that can free its device between steps."""

    def leave_device(self) -> None:
        """Move weights, optimizer state and frozen tensors to host memory.

        Later calls move them back, bit-equal. Idempotent; not thread-safe. Raises ResourceError if
        the host lacks memory.
        """
        ...


@runtime_checkable
class TrainsParts(Protocol):
    """Learner that can compute parts before the batch is known.

    `save_weights` and `save_optimizer` may run in another thread during a part that is not an
    update.
    """

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step, before `train` gets it again.

        Saved weights stay those before the step. Raises NonFinite, dropping speculative work.
        """
        ...
