"""Digest of a batch, and staleness arithmetic."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import attrgetter
from typing import TypeVar

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.control import TakenGroup

T = TypeVar("T")

_BATCH_DIGEST_HEAD = b"dora-pipe batch 1\n"
"""Version of the digested text."""


def deadline_of(version: int, max_staleness: int) -> int:
    """Return the last step that may train a group of this version (C3)."""
    return version + max_staleness


def staleness_of(step: int, version: int) -> int:
    """Return the staleness in the batch of `step`; step t trains version t."""
    return step - version


def batch_digest(groups: Sequence[TakenGroup]) -> str:
    """Return the sha256 (hex) of a batch, including bytes and positions of its records.

    The order of groups and trajectories, step and attempt do not count. Partitions and offsets do:
    the same trajectory logged twice is two records. Raises SchemaError for a duplicate group or
    trajectory.

    The text is ``dora-pipe batch 1``, then per group, sorted by id, a line of group, version,
    deadline, and per trajectory, sorted by id, a line of trajectory, attempt, incarnation,
    partition, offset, sha256; fields separated by tabs, lines ended by newlines. Groups scored
    together add a line of trajectory and reward (Python's `repr`) per reward.
    """
    _refuse_twice([group.group for group in groups])
    _refuse_twice([trajectory.trajectory for group in groups for trajectory in group.trajectories])
    return lines_digest(map(batch_lines, sorted(groups, key=attrgetter("group"))))


def parts_of(groups: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """Split groups into parts; the last part has the rest.

    Example: ``parts_of("abcde", [2, 1]) == ["ab", "c", "de"]``
    """
    ends = list(accumulate(sizes))
    return [groups[start:end] for start, end in zip([0, *ends], [*ends, len(groups)], strict=True)]


def batch_lines(group: TakenGroup) -> bytes:
    """Return a group's lines of the text of `batch_digest`."""
    head = f"{group.group}\t{group.version}\t{group.deadline}\n"
    lines = [
        f"{trajectory.trajectory}\t{trajectory.attempt}\t{trajectory.incarnation}\t"
        f"{trajectory.partition}\t{trajectory.offset}\t{trajectory.sha256}\n"
        for trajectory in sorted(group.trajectories, key=attrgetter("trajectory"))
    ]
    lines += [f"{name}\t{reward!r}\n" for name, reward in sorted(group.rewards.items())]
    return (head + "".join(lines)).encode()


def lines_digest(lines: Iterable[bytes]) -> str:
    """Return `batch_digest` of lines sorted by group id."""
    digest = hashlib.sha256(_BATCH_DIGEST_HEAD)
    for line in lines:
        digest.update(line)
    return digest.hexdigest()


def _refuse_twice(ids: Sequence[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    earlier: set[str] = set()
    for trajectory in ids:
        if trajectory in earlier:
            raise SchemaError(f"{trajectory} is in the batch twice", path="$.groups")
        earlier.add(trajectory)
