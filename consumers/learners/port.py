"""The port of a trainer: a step is a function of (weights, optimizer state, batch, settings)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dora_pipe.schemas.batch import parts_of
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
    """With numpy arrays (NaN for None) where they come from a log."""
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
    """The batch of one step, or a part of it; groups in dispatch order, in that of each part."""

    step: int
    groups: Sequence[TrainGroup]
    reference: Reference | None = None
    """None: version 0, which the learner was made with."""
    teacher: Mapping[str, Sequence[float]] | None = None
    """By trajectory, the log-probs of its counted tokens under the teacher, float32; None: the step
    has none."""
    parts: Sequence[int] = ()
    """How many groups each part but the last has, in order; empty: the batch is one."""
    weights: Mapping[str, float] | None = None
    """By trajectory, a factor of its loss, for a step that is trained again otherwise; 1 where
    nothing is said."""

    def in_parts(self) -> list[TrainBatch]:
        """Its parts, each as a batch that is one."""
        found = parts_of(self.groups, self.parts)
        return [replace(self, groups=groups, parts=()) for groups in found]


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
        """One training step. Raises NonFinite (the state is then no longer valid).

        Of a batch in parts the gradient is added up part by part, each divided by what the whole is
        divided by; with several `trainer.minibatches` each part is an update, and the last one is
        dealt to those that are left. What was computed of its first parts is used. Equal bits do
        not depend on that.
        """
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


@runtime_checkable
class LeavesDevice(Protocol):
    """A learner that can make room on its device while no step is computed."""

    def leave_device(self) -> None:
        """Weights, optimizer state and what is frozen beside them go to the host's memory, and the
        device's is given back. The next call of any method that needs them has them come again, and
        gives the bits that it would have given. Idempotent; no other method may run meanwhile.
        Raises ResourceError where the host has no room.
        """
        ...


@runtime_checkable
class TrainsParts(Protocol):
    """A learner that can begin with parts of a batch; another computes them with the batch.

    While one thread computes a part, another may write the weights and the optimizer state down
    (`save_weights`, `save_optimizer`): a part changes neither. Whoever cannot do both at once lets
    one of them wait. A part that is an update, with several `trainer.minibatches`, is never asked
    for meanwhile.
    """

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step, its gradient or its update, ahead of `train`, which is
        told of it again. What is saved after it is as it was before. Raises NonFinite (what was
        computed ahead is then dropped)."""
        ...
