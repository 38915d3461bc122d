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
    """Group of a batch: its trajectories in order, invalid (masked) ones included."""

    group: str
    version: int
    trajectories: Sequence[Trajectory]
    """Numpy arrays (NaN for None) if read from a log."""
    places: Sequence[LoggedAt] = ()
    """Per trajectory, for ranks that read their shares from the log; empty without a log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """KL reference version, if it moves."""

    version: int
    digest: str
    weights: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Batch of a step, or a part of it; groups in dispatch order within each part."""

    step: int
    groups: Sequence[TrainGroup]
    reference: Reference | None = None
    """None: version 0, given to the constructor."""
    teacher: Mapping[str, Sequence[float]] | None = None
    """Float32 log-probs of counted tokens under the teacher, by trajectory."""
    parts: Sequence[int] = ()
    """Number of groups of each part but the last; empty if unsplit."""
    weights: Mapping[str, float] | None = None
    """Loss factor by trajectory (default 1), for altered replays."""

    def in_parts(self) -> list[TrainBatch]:
        """Return its parts as unsplit batches."""
        found = parts_of(self.groups, self.parts)
        return [replace(self, groups=groups, parts=()) for groups in found]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step; all metrics are finite."""

    figures: Mapping[str, float]
    contributions: Sequence[Mapping[str, Any]]
    """Rows of the contributions file (`contributions.SCHEMA`), in batch order."""
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

        Gradients of parts add up, each divided by the divisor of the whole. With several
        `trainer.minibatches` each part is an update, and the last part fills the rest. Uses
        speculative parts; results are bit-equal without them.
        """
        ...

    def manifest(self) -> Manifest:
        """Return the manifest of the present weights without writing them."""
        ...

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
        """Move weights, optimizer state and frozen tensors to host memory and free the device.

        The next call that needs them moves them back, with equal bits. Idempotent; not concurrent
        with other methods. Raises ResourceError if the host lacks memory.
        """
        ...


@runtime_checkable
class TrainsParts(Protocol):
    """Learner that can compute parts before the batch is known.

    `save_weights` and `save_optimizer` may run in another thread during a part; a learner that
    cannot overlap must serialize them. Parts that are updates never overlap with them.
    """

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """Compute the gradient or update of a step's next part, before `train` gets it again.

        Saved weights stay those before the step. Raises NonFinite, which drops speculative work.
        """
        ...
