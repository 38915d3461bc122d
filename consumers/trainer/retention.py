"""Decides which versions the policy store keeps, and which it may drop; pure. docs/storage.md.

Only the trainer deletes, after a commit that names what it will delete. What is pinned it takes
from the batch decision that the commit carries out. That is never too little, however slow the
orchestrator is and whoever was started again in between: a dispatch carries the newest version and
a worker is assigned that one or one that an open group carries, so that of the versions below the
step of a batch none is pinned later that was not pinned then.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.schemas.policy import Blob

RECOVERY_CHECKPOINTS: Final = 2
"""The newest checkpoints stay whatever `keep_every` says: a restart begins at the newest one, and
at the one before it when the commit of that one was rejected or its file is damaged."""

DROPPED_MAX: Final = 1000
"""Versions that one commit drops; after a change of `keep_every` the next ones drop the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Names in the policy store: weights digests and sha256 of optimizer states."""

    weights: tuple[str, ...]
    optimizers: tuple[str, ...]


def retained(commits: Sequence[Blob | None], pins: Collection[int], keep_every: int) -> set[int]:
    """The versions that stay, of 0 and those that `commits` made: one per step, its checkpoint.

    These are 0, the newest and the one before it (the last commit may yet be rejected), every
    pinned one, every `keep_every`-th checkpoint, and the newest checkpoints. With `keep_every` 0,
    or nothing said about pins, everything stays.
    """
    newest = len(commits)
    if keep_every == 0 or not pins:
        return set(range(newest + 1))
    checkpoints = [step + 1 for step, checkpoint in enumerate(commits) if checkpoint is not None]
    kept = checkpoints[keep_every - 1 :: keep_every] + checkpoints[-RECOVERY_CHECKPOINTS:]
    pinned = (version for version in pins if 0 <= version <= newest)
    return {0, max(0, newest - 1), newest, *pinned, *kept}


def droppable(
    history: CommitHistory, checkpoint: Blob | None, pins: Collection[int], keep_every: int
) -> tuple[int, ...]:
    """What the commit after `history`, with this checkpoint, drops: the oldest first."""
    if keep_every == 0 or not pins:
        return ()
    commits = [note.checkpoint for note in history.notes]
    stays = retained([*commits, checkpoint], pins, keep_every)
    return tuple(sorted(history.kept - stays)[:DROPPED_MAX])


def files_of(history: CommitHistory, dropped: Collection[int]) -> Files:
    """The files of versions that were dropped; without those that a kept version has too."""
    kept = {history.digest_of(version) for version in history.kept}
    blobs = {history.checkpoint_of(version) for version in history.kept}
    weights = {history.digest_of(version) for version in dropped} - kept
    optimizers = {history.checkpoint_of(version) for version in dropped} - blobs - {""}
    return Files(weights=tuple(sorted(weights)), optimizers=tuple(sorted(optimizers)))
