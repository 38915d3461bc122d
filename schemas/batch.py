"""What identifies a batch, and the two sums about staleness that every role must do alike."""

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
"""Names the text that is digested; another text gets another number."""


def deadline_of(version: int, max_staleness: int) -> int:
    """The last step that may train a group of this version (C3), as it stood at dispatch."""
    return version + max_staleness


def staleness_of(step: int, version: int) -> int:
    """Staleness of a group of `version` in the batch of `step`: step t trains version t."""
    return step - version


def batch_digest(groups: Sequence[TakenGroup]) -> str:
    """sha256 (hex) of what a batch is made of, down to the bytes and the places of its records.

    A batch is a set: neither the order of the groups nor that of the siblings counts, and neither
    do step and attempt. Partitions and offsets do count, since the commit names them: the same
    trajectory logged twice is two records, and only one of them was trained. Raises SchemaError
    when a group or a trajectory is there twice.

    The digested text is ``dora-pipe batch 1``, then per group, sorted by id, a line of group,
    version, deadline, and per trajectory, sorted by id, a line of trajectory, attempt, epoch,
    partition, offset, sha256; tabs between the fields, a newline after each line. Of a group that
    was scored together a line of trajectory and reward (Python's `repr`) follows per reward.
    """
    _refuse_twice([group.group for group in groups])
    _refuse_twice([one.trajectory for group in groups for one in group.trajectories])
    return lines_digest(map(batch_lines, sorted(groups, key=attrgetter("group"))))


def parts_of(groups: Sequence[T], sizes: Sequence[int]) -> list[Sequence[T]]:
    """The groups of a batch part by part; the last part is what `sizes` leave.

    Example: ``parts_of("abcde", [2, 1]) == ["ab", "c", "de"]``
    """
    ends = list(accumulate(sizes))
    return [groups[at:end] for at, end in zip([0, *ends], [*ends, len(groups)], strict=True)]


def batch_lines(group: TakenGroup) -> bytes:
    """The lines of one group in the text that `batch_digest` digests."""
    head = f"{group.group}\t{group.version}\t{group.deadline}\n"
    lines = [
        f"{one.trajectory}\t{one.attempt}\t{one.epoch}\t"
        f"{one.partition}\t{one.offset}\t{one.sha256}\n"
        for one in sorted(group.trajectories, key=attrgetter("trajectory"))
    ]
    lines += [f"{name}\t{reward!r}\n" for name, reward in sorted(group.rewards.items())]
    return (head + "".join(lines)).encode()


def lines_digest(lines: Iterable[bytes]) -> str:
    """`batch_digest` of groups whose lines are there already, sorted by the group's id."""
    digest = hashlib.sha256(_BATCH_DIGEST_HEAD)
    for one in lines:
        digest.update(one)
    return digest.hexdigest()


def _refuse_twice(ids: Sequence[str]) -> None:
    if len(set(ids)) == len(ids):
        return
    seen: set[str] = set()
    for one in ids:
        if one in seen:
            raise SchemaError(f"{one} is in the batch twice", path="$.groups")
        seen.add(one)
