"""What of a batch is otherwise than in the log when its step is trained again; pure.

1. What does not count is masked as an invalid trajectory is: it gives no gradient, and its siblings
   are compared without it. A group that does not count goes whole, as if it had not been taken.
2. Rewards take the place of the logged ones, and of those of a group that was scored together.
3. A weight is a factor of the trajectory's loss. What the mean divides by stays as it was: it is
   worth more or less beside the others, and never changes what they are worth.

What a group comes to whose siblings can no longer be compared is the learner's rule: advantages of
0 where fewer than two are left, or all are worth the same.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from dora_pipe.consumers.learners.port import TrainBatch, TrainGroup
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.trajectory import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchChange:
    """What is otherwise than in the log when a step is trained again.

    Example: ``BatchChange(without=frozenset({"g0000000042"}), weights={"g0000000043-001": 0.5})``
    """

    without: frozenset[str] = frozenset()
    """Groups and trajectories that do not count."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """By trajectory, instead of the logged ones."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """By trajectory, factor of its loss; 1 where nothing is said."""

    def __post_init__(self) -> None:
        """Raises UsageError for a reward that is no number, and a weight that is below 0."""
        for name, reward in self.rewards.items():
            if not math.isfinite(reward):
                raise UsageError(f"the reward of {name} is {reward}")
        for name, weight in self.weights.items():
            if not 0.0 <= weight < math.inf:
                raise UsageError(f"the weight of {name} is {weight}", hint="0 or more, and finite")


UNCHANGED: Final = BatchChange()


def changed(batch: TrainBatch, change: BatchChange) -> TrainBatch:
    """The batch as it is trained: the very same one where the change says nothing of it.

    Its parts go on without the groups that do not count; a part that is left without any is none.
    """
    groups = [_changed(one, change) for one in batch.groups if one.group not in change.without]
    weights = _of(change.weights, groups)
    same = len(groups) == len(batch.groups) and all(
        one is other for one, other in zip(groups, batch.groups, strict=True)
    )
    if same and not weights:
        return batch
    sizes = [
        sum(one.group not in change.without for one in part.groups) for part in batch.in_parts()
    ]
    parts = [size for size in sizes if size][:-1]
    return replace(batch, groups=groups, parts=parts, weights=weights or None)


def _of(weights: Mapping[str, float], groups: Collection[TrainGroup]) -> dict[str, float]:
    """The weights of these groups that are not 1."""
    if not weights:
        return {}
    names = (one.trajectory for group in groups for one in group.trajectories)
    return {name: weights[name] for name in names if weights.get(name, 1.0) != 1.0}


def _changed(group: TrainGroup, change: BatchChange) -> TrainGroup:
    rows = [_counted(one, change) for one in group.trajectories]
    if all(one is other for one, other in zip(rows, group.trajectories, strict=True)):
        return group
    return replace(group, trajectories=rows)


def _counted(one: Trajectory, change: BatchChange) -> Trajectory:
    """The trajectory with the reward that counts; with none where it does not."""
    if one.trajectory in change.without:
        return one if one.reward is None else replace(one, reward=None)
    reward = change.rewards.get(one.trajectory, one.reward)
    if reward == one.reward:
        return one
    return replace(one, reward=reward)
