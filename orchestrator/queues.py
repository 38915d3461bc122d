"""The order in which queued requests are placed: oldest deadline first; it decides nothing else."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

from dora_pipe.schemas.identity import Purpose, group_id, trajectory_id
from dora_pipe.schemas.rounds import GroupSpec

RANK: dict[Purpose, int] = {"train": 0, "eval": 1}
"""Queued requests of training groups go before those of evaluation groups of the same version."""


class QueueKey(NamedTuple):
    """Place of a request in the queue of its version: what sorts first is placed first."""

    rank: int
    deadline: int
    ordinal: int
    sibling: int

    @property
    def trajectory(self) -> str:
        """Id of the request."""
        purpose: Purpose = "train" if self.rank == RANK["train"] else "eval"
        return trajectory_id(group_id(purpose, self.ordinal), self.sibling)


def queue_key(group: GroupSpec, sibling: int) -> QueueKey:
    """Where a request of this group queues: oldest deadline first, then ordinal, sibling."""
    return QueueKey(RANK[group.purpose], group.deadline, group.ordinal, sibling)


def push(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Into the queue of a version, at its place."""
    insort(queues.setdefault(version, []), key)


def pull(queues: dict[int, list[QueueKey]], version: int, key: QueueKey) -> None:
    """Out of the queue of a version; it must be there."""
    queue = queues[version]
    place = bisect_left(queue, key)
    assert queue[place] == key, "the request is not queued"
    del queue[place]
    if not queue:
        del queues[version]
