"""Learner without torch, for role tests and the simulator.

Weights are sha256(weights before, batch, settings) in a real safetensors file. An optional sparse
tensor changes one element per step, for deltas.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import MICRO_BATCH_TOKENS, advantage_rule
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.core.errors import NonFinite, PolicyError
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import canonical
from dora_pipe.store.safetensors_file import (
    TensorSource,
    manifest_in_memory,
    mapped,
    read_entries,
    read_manifest,
    write_tensors,
)

WEIGHTS_BYTES: Final = 32
INITIAL: Final = bytes(WEIGHTS_BYTES)
SPARSE: Final = "sparse"
"""Bfloat16 tensor of which a step changes one element."""

_FINITE: Final = 0x3FFF
"""Bit mask that excludes infinity and NaN in bfloat16."""

_Names = tuple[int, tuple[str, ...]]


class SimulatedLearner:
    """Deterministic fake; trajectories in `poison` raise NonFinite."""

    name = "simulated"
    version = "1"

    def __init__(self, *, flavour: str = "", poison: Sequence[str] = ()) -> None:
        self._flavour = flavour
        self._poison = frozenset(poison)
        self._weights = INITIAL
        self._sparse: Sequence[int] = ()
        self._steps = 0
        self._gathered: list[tuple[_Names, bytes]] = []

    def load(self, weights: Path, *, digest: str, optimizer: Path | None) -> None:
        if read_manifest(weights).digest != digest:
            raise PolicyError(f"{weights} holds other weights")
        self._weights = _read(weights, "weights")
        self._sparse = _sparse(weights)
        self._steps = 0
        self._gathered = []
        if optimizer is not None:
            self._steps = int.from_bytes(_read(optimizer, "steps"), "little")

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        gathered, self._gathered = self._gathered, []
        trajectories = [trajectory for group in batch.groups for trajectory in group.trajectories]
        past = hashlib.sha256(self._weights + self._steps.to_bytes(8, "little"))
        past.update(self._flavour.encode() + canonical(_logged(settings)))
        if batch.parts:
            parts = batch.in_parts()
            if [key for key, _ in gathered] != [_names(part) for part in parts[: len(gathered)]]:
                gathered = []
            for _, digest in gathered:
                past.update(digest)
            for part in parts[len(gathered) :]:
                past.update(self._digest(part))
        else:
            for trajectory in self._sound(trajectories):
                _update_digest(past, trajectory, batch)
        self._weights = past.digest()
        self._sparse = _changed(self._sparse, self._weights)
        self._steps += 1
        tokens = float(sum(trajectory.sampled for trajectory in trajectories))
        metrics = {"loss": 0.0, "tokens": tokens, "trajectories": float(len(trajectories))}
        return StepResult(
            metrics=metrics, contributions=_contributions(batch, settings), compute_s=0.0
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        gathered, self._gathered = self._gathered, []
        digest = self._digest(batch)
        if gathered and gathered[0][0][0] != batch.step:
            gathered = []
        self._gathered = [*gathered, (_names(batch), digest)]

    def _digest(self, part: TrainBatch) -> bytes:
        digest = hashlib.sha256()
        for trajectory in self._sound(
            [trajectory for group in part.groups for trajectory in group.trajectories]
        ):
            _update_digest(digest, trajectory, part)
        return digest.digest()

    def _sound(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        poisoned = sorted(self._poison & {trajectory.trajectory for trajectory in trajectories})
        if poisoned:
            raise NonFinite(f"{poisoned[0]} makes the loss infinite")
        return trajectories

    def manifest(self) -> Manifest:
        return manifest_in_memory(_sources(self._weights, self._sparse))

    def save_weights(self, path: Path) -> Manifest:
        return write_tensors(path, _sources(self._weights, self._sparse))

    def save_optimizer(self, path: Path) -> None:
        write_tensors(path, [_source("steps", self._steps.to_bytes(8, "little"))])

    def numerics(self) -> dict[str, str]:
        return {"trainer": f"{self.name} {self.version}", "micro_batch_tokens": "1"}


def _names(part: TrainBatch) -> _Names:
    return part.step, tuple(group.group for group in part.groups)


def _plain(numbers: Sequence[Any]) -> list[Any]:
    values = numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)
    return [None if value != value else value for value in values]


def _update_digest(past: Any, trajectory: Trajectory, batch: TrainBatch) -> None:
    past.update(
        canonical(
            [
                trajectory.trajectory,
                trajectory.version,
                trajectory.reward,
                _plain(trajectory.token_ids),
            ]
        )
    )
    past.update(canonical(_plain(trajectory.logprobs)))
    if trajectory.meta.contexts:
        past.update(canonical([msgspec.structs.astuple(of) for of in trajectory.meta.contexts]))
    if batch.teacher is not None:
        past.update(canonical(list(batch.teacher[trajectory.trajectory])))


def _logged(settings: Settings) -> dict[str, float | int | str | bool]:
    return {key: value for key, value in settings.items() if key != MICRO_BATCH_TOKENS}


def initial_weights(path: Path, *, sparse: int = 0) -> Manifest:
    """Write version 0 of a simulated policy with `sparse` sparse elements."""
    return write_tensors(path, _sources(INITIAL, [0] * sparse))


def _changed(sparse: Sequence[int], weights: bytes) -> Sequence[int]:
    if not sparse:
        return sparse
    position, value = (int.from_bytes(weights[start : start + 4], "little") for start in (0, 4))
    position %= len(sparse)
    return [*sparse[:position], value & _FINITE, *sparse[position + 1 :]]


def _sources(weights: bytes, sparse: Sequence[int]) -> list[TensorSource]:
    sources = [_source("weights", weights)]
    if sparse:
        data = b"".join(bits.to_bytes(2, "little") for bits in sparse)
        sources.append(
            TensorSource(name=SPARSE, dtype="BF16", shape=(len(sparse),), data=lambda: data)
        )
    return sources


def _sparse(path: Path) -> Sequence[int]:
    if all(entry.name != SPARSE for entry in read_entries(path)):
        return ()
    data = _read(path, SPARSE)
    return [int.from_bytes(data[start : start + 2], "little") for start in range(0, len(data), 2)]


def _source(name: str, data: bytes) -> TensorSource:
    return TensorSource(name=name, dtype="U8", shape=(len(data),), data=lambda: data)


def _read(path: Path, name: str) -> bytes:
    entries = {entry.name: entry for entry in read_entries(path)}
    if name not in entries:
        raise PolicyError(f"{path} is not a file of a simulated trainer")
    with mapped(path) as data:
        return bytes(data[entries[name].start : entries[name].end])


def _contributions(batch: TrainBatch, settings: Settings) -> list[dict[str, Any]]:
    ordered = sorted(batch.groups, key=lambda group: group.group)
    groups = [
        (group.version, [trajectory.reward for trajectory in group.trajectories])
        for group in ordered
    ]
    advantages = batch_advantages(groups, *advantage_rule(settings))
    return [
        {
            "trajectory": trajectory.trajectory,
            "group": group.group,
            "version": trajectory.version,
            "staleness": batch.step - trajectory.version,
            "reward": trajectory.reward,
            "advantage": advantage,
            "tokens": trajectory.sampled,
            "minibatch": 0,
        }
        for group, of_group in zip(ordered, advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
    ]
