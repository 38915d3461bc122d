"""Changes of a replay: rewards, rows, settings, start.

1. A dropped trajectory gives no gradient and no baseline. A dropped group leaves the batch.
2. A reward replaces the logged one; None means no valid reward.

Advantages are 0 in a group with fewer than two rewards or equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.consumers.learners.learner import Settings, TrainBatch, TrainGroup
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import canonical, sha256_hex


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Weights and optimizer state before a step."""

    weights: Path
    digest: str
    optimizer: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Difference between a replay and its run."""

    drop: frozenset[str] = frozenset()
    """Groups and trajectories."""
    rewards: Mapping[str, float | None] = field(default_factory=dict)
    """By trajectory."""
    settings: Settings = field(default_factory=dict)
    """Logged keys of the trainer and the objective."""
    start: Start | None = None
    """Default: the run's own."""

    def __post_init__(self) -> None:
        """Raises UsageError for a non-finite reward."""
        for name, reward in self.rewards.items():
            if reward is not None and not math.isfinite(reward):
                raise UsageError(f"the reward of {name} is {reward}", hint="a finite number")

    @property
    def plain(self) -> dict[str, Any]:
        return {
            "drop": sorted(self.drop),
            "rewards": dict(self.rewards),
            "settings": dict(self.settings),
            "start": None if self.start is None else self.start.digest,
        }

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON (hex)."""
        return sha256_hex(canonical(self.plain))


EMPTY: Final = Change()


def changed_batch(batch: TrainBatch, change: Change) -> TrainBatch:
    """Return the batch to train, the same object if unchanged. Raises UsageError if it is empty."""
    groups = [_group(group, change) for group in batch.groups if group.group not in change.drop]
    if batch.groups and not groups:
        raise UsageError(f"step {batch.step} has no group left", hint="drop fewer groups")
    same = len(groups) == len(batch.groups) and all(
        changed is other for changed, other in zip(groups, batch.groups, strict=True)
    )
    if same:
        return batch
    sizes = [
        sum(group.group not in change.drop for group in part.groups) for part in batch.in_parts()
    ]
    parts = [size for size in sizes if size][:-1]
    return replace(batch, groups=groups, parts=parts)


def _group(group: TrainGroup, change: Change) -> TrainGroup:
    rows = [_trajectory(trajectory, change) for trajectory in group.trajectories]
    if all(changed is other for changed, other in zip(rows, group.trajectories, strict=True)):
        return group
    return replace(group, trajectories=rows)


def _trajectory(trajectory: Trajectory, change: Change) -> Trajectory:
    name = trajectory.trajectory
    reward = None if name in change.drop else change.rewards.get(name, trajectory.reward)
    return trajectory if reward == trajectory.reward else replace(trajectory, reward=reward)


class RewardLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a rewards file. Example: ``{"trajectory": "g0000000042-003", "reward": 0.5}``."""

    trajectory: str
    reward: float | None
    """None: not valid."""


def write_rewards(file: Path, rows: Iterable[RewardLine]) -> None:
    """Write a rewards file atomically."""
    partial = file.with_name(f"{file.name}.partial")
    with partial.open("wb") as lines:
        lines.writelines(msgspec.json.encode(row) + b"\n" for row in rows)
    partial.replace(file)


def read_rewards(file: Path) -> dict[str, float | None]:
    """Read a rewards file. Raises UsageError."""
    rewards: dict[str, float | None] = {}
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{file} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            row = msgspec.json.decode(line, type=RewardLine)
        except msgspec.DecodeError as error:
            raise UsageError(
                f"{file}, line {number}: {error}",
                hint='a JSON object per line: {"trajectory": "g0000000042-003", "reward": 0.5}',
            ) from None
        rewards[row.trajectory] = row.reward
    return rewards
