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
        """See `Learner`."""
        if read_manifest(weights).digest != digest:
            raise PolicyError(f"{weights} holds other weights")
        self._weights = _read(weights, "weights")
        self._sparse = _sparse(weights)
        self._steps = 0
        self._gathered = []
        if optimizer is not None:
            self._steps = int.from_bytes(_read(optimizer, "steps"), "little")

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        """See `Learner`."""
        gathered, self._gathered = self._gathered, []
        trajectories = [one for group in batch.groups for one in group.trajectories]
        past = hashlib.sha256(self._weights + self._steps.to_bytes(8, "little"))
        past.update(self._flavour.encode() + canonical(_logged(settings)))
        if batch.parts:
            parts = batch.in_parts()
            if [key for key, _ in gathered] != [_names(one) for one in parts[: len(gathered)]]:
                gathered = []
            for _, digest in gathered:
                past.update(digest)
            for part in parts[len(gathered) :]:
                past.update(self._digest(part))
        else:
            for one in self._sound(trajectories):
                _take_in(past, one, batch)
        self._weights = past.digest()
        self._sparse = _changed(self._sparse, self._weights)
        self._steps += 1
        tokens = float(sum(one.sampled for one in trajectories))
        metrics = {"loss": 0.0, "tokens": tokens, "trajectories": float(len(trajectories))}
        return StepResult(
            metrics=metrics, contributions=_contributions(batch, settings), compute_s=0.0
        )

    def train_part(self, batch: TrainBatch, settings: Settings) -> None:
        """See `TrainsParts`."""
        gathered, self._gathered = self._gathered, []
        digest = self._digest(batch)
        if gathered and gathered[0][0][0] != batch.step:
            gathered = []
        self._gathered = [*gathered, (_names(batch), digest)]

    def _digest(self, part: TrainBatch) -> bytes:
        found = hashlib.sha256()
        for one in self._sound([one for group in part.groups for one in group.trajectories]):
            _take_in(found, one, part)
        return found.digest()

    def _sound(self, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        poisoned = sorted(self._poison & {one.trajectory for one in trajectories})
        if poisoned:
            raise NonFinite(f"{poisoned[0]} makes the loss infinite")
        return trajectories

    def manifest(self) -> Manifest:
        """See `Learner`."""
        return manifest_in_memory(_sources(self._weights, self._sparse))

    def save_weights(self, path: Path) -> Manifest:
        """See `Learner`."""
        return write_tensors(path, _sources(self._weights, self._sparse))

    def save_optimizer(self, path: Path) -> None:
        """Write the number of steps."""
        write_tensors(path, [_source("steps", self._steps.to_bytes(8, "little"))])

    def numerics(self) -> dict[str, str]:
        """See `Learner`."""
        return {"trainer": f"{self.name} {self.version}", "micro_batch_tokens": "1"}


def _names(part: TrainBatch) -> _Names:
    return part.step, tuple(group.group for group in part.groups)


def _plain(numbers: Sequence[Any]) -> list[Any]:
    values = numbers.tolist() if isinstance(numbers, np.ndarray) else list(numbers)
    return [None if one != one else one for one in values]


def _take_in(past: Any, one: Trajectory, batch: TrainBatch) -> None:
    past.update(canonical([one.trajectory, one.version, one.reward, _plain(one.token_ids)]))
    past.update(canonical(_plain(one.logprobs)))
    if one.meta.contexts:
        past.update(canonical([msgspec.structs.astuple(of) for of in one.meta.contexts]))
    weight = (batch.weights or {}).get(one.trajectory, 1.0)
    if weight != 1.0:
        past.update(canonical([weight]))
    if batch.teacher is not None:
        past.update(canonical(list(batch.teacher[one.trajectory])))


def _logged(settings: Settings) -> dict[str, float | int | str | bool]:
    return {key: value for key, value in settings.items() if key != MICRO_BATCH_TOKENS}


def initial_weights(path: Path, *, sparse: int = 0) -> Manifest:
    """Write version 0 of a simulated policy with `sparse` sparse elements."""
    return write_tensors(path, _sources(INITIAL, [0] * sparse))


def _changed(sparse: Sequence[int], weights: bytes) -> Sequence[int]:
    if not sparse:
        return sparse
    at, value = (int.from_bytes(weights[start : start + 4], "little") for start in (0, 4))
    at %= len(sparse)
    return [*sparse[:at], value & _FINITE, *sparse[at + 1 :]]


def _sources(weights: bytes, sparse: Sequence[int]) -> list[TensorSource]:
    found = [_source("weights", weights)]
    if sparse:
        data = b"".join(bits.to_bytes(2, "little") for bits in sparse)
        found.append(
            TensorSource(name=SPARSE, dtype="BF16", shape=(len(sparse),), data=lambda: data)
        )
    return found


def _sparse(path: Path) -> Sequence[int]:
    if all(entry.name != SPARSE for entry in read_entries(path)):
        return ()
    data = _read(path, SPARSE)
    return [int.from_bytes(data[at : at + 2], "little") for at in range(0, len(data), 2)]


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
    groups = [(group.version, [one.reward for one in group.trajectories]) for group in ordered]
    advantages = batch_advantages(groups, *advantage_rule(settings))
    return [
        {
            "trajectory": one.trajectory,
            "group": group.group,
            "version": one.version,
            "staleness": batch.step - one.version,
            "reward": one.reward,
            "advantage": advantage,
            "tokens": one.sampled,
            "minibatch": 0,
        }
        for group, of_group in zip(ordered, advantages, strict=True)
        for one, advantage in zip(group.trajectories, of_group, strict=True)
    ]
