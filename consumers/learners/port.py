"""The port of a trainer: a step is a function of (weights, optimizer state, batch, settings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.trajectory import Trajectory

Settings = Mapping[str, float | int | str | bool]
"""The logged configuration keys in force, e.g. ``{"trainer.learning_rate": 3e-4}``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedAt:
    """Where a trajectory lies in the log, and the sha256 of its value there."""

    partition: int
    offset: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainGroup:
    """One group of a batch: its logged siblings in order, with invalid ones (masked) among them."""

    group: str
    version: int
    trajectories: Sequence[Trajectory]
    places: Sequence[LoggedAt] = ()
    """Of each trajectory, for a trainer of several ranks, which read their shares by themselves;
    empty for a batch that is in no log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The version that a step's KL is to, where it is not version 0 for ever."""

    version: int
    digest: str
    weights: Path
    """A file of this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """The batch of one step, groups in dispatch order."""

    step: int
    groups: Sequence[TrainGroup]
    reference: Reference | None = None
    """None: version 0, which the learner was made with."""
    teacher: Mapping[str, Sequence[float]] | None = None
    """By trajectory, the log-probs of its counted tokens under the teacher, float32; None: the step
    has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step computed. `figures` are finite; the contributions have one row per trajectory."""

    figures: Mapping[str, float]
    contributions: Sequence[Mapping[str, Any]]
    """Rows of the contributions file (see `contributions.SCHEMA`), in the order of the batch."""
    compute_s: float


class Learner(Protocol):
    """A training engine with its weights and optimizer state."""

    name: str
    version: str

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        """Take weights and, from a checkpoint, the optimizer state. Raises PolicyError."""
        ...

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        """One training step. Raises NonFinite (the state is then no longer valid)."""
        ...

    def manifest(self) -> Manifest:
        """The manifest of the present weights, without writing them."""
        ...

    def save_weights(self, path: Path) -> Manifest:
        """Write the present weights to a safetensors file (not yet fsynced) and describe them."""
        ...

    def save_optimizer(self, path: Path) -> None:
        """Write the optimizer state to a safetensors file."""
        ...

    def numerics(self) -> dict[str, str]:
        """The fingerprint under which equal bits are promised: versions, device, threads, ..."""
        ...
