"""The committed steps of a run as the trainer remembers them, and which versions the store keeps of
them; decides which commits count. Pure. docs/storage.md.

Of each commit only a note is kept (which step, where it lies, which weights, whether there is a
checkpoint), so that memory does not grow with batches.

Only the trainer deletes, after a commit that names what it will delete. What is pinned it takes
from the batch decision that the commit carries out. That is never too little, however slow the
orchestrator is and whoever was started again in between: a dispatch carries the newest version and
a worker is assigned that one or one that an open group carries, so that of the versions below the
step of a batch none is pinned later that was not pinned then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from dora_pipe.config.logged import REFERENCE
from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.schemas.control import RunStarted, StepCommitted
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import TakeBatch, TakePart

CHANGED_SHARE: Final = "changed_share"
PATCH_SHARE: Final = "patch_share"
OF_PATCHES: Final = frozenset({CHANGED_SHARE, PATCH_SHARE})
"""Figures of a step that say how its version is stored, not how it was trained: the share of the
weights that changed, and the bytes of the patch as a share of those of all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """A committed step and where its commit lies in control."""

    step: int
    attempt: int
    offset: int
    digest: str
    """Weights after the step."""
    checkpoint: Blob | None
    whole: bool = True
    """As in the commit: the version can be had without the one before it."""
    starts: Mapping[int, int] = field(default_factory=dict)
    """The smallest offset that it took, by partition."""


@dataclass(slots=True, kw_only=True)
class CommitHistory:
    """The committed steps of a run, contiguous from 0, and what a restart needs beside them."""

    run_started: RunStarted | None = None
    role_epoch: int = -1
    """The newest of the trainer; -1 for none."""
    notes: list[CommitNote] = field(default_factory=list)
    """Of the steps from 0 on."""
    decisions_next: int = 0
    """Where to go on in the decisions topic."""
    trained: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Group to (step, deadline), as long as the deadline is not past."""
    kept: set[int] = field(default_factory=lambda: {0})
    """Versions that no commit has dropped."""

    @property
    def starts(self) -> dict[int, int]:
        """The smallest offset of the last commit that took from a partition, by partition."""
        return {at: offset for note in self.notes for at, offset in note.starts.items()}

    def starts_from(self, step: int) -> dict[int, int]:
        """The smallest offset that this step or a later one took, by partition."""
        found: dict[int, int] = {}
        for note in self.notes[step:]:
            for at, offset in note.starts.items():
                found[at] = min(offset, found.get(at, offset))
        return found

    @property
    def next_step(self) -> int:
        """The step that is not committed yet."""
        return len(self.notes)

    def digest_of(self, version: int) -> str:
        """Weights digest of a committed version."""
        assert self.run_started is not None
        if version == 0:
            return self.run_started.policy.digest
        return self.notes[version - 1].digest

    def checkpoint(self, version: int) -> Blob | None:
        """The optimizer state of a committed version; None where none was kept."""
        if version:
            return self.notes[version - 1].checkpoint
        return None if self.run_started is None else self.run_started.optimizer

    def checkpoint_of(self, version: int) -> str:
        """Its sha256; empty where none was kept."""
        blob = self.checkpoint(version)
        return "" if blob is None else blob.sha256

    @property
    def interruptible(self) -> bool:
        """Whether the run lets trajectories mix versions; a frozen key."""
        assert self.run_started is not None
        return bool(self.run_started.config.get("staleness", {}).get("interruptible", False))

    def reference_of(self, settings: Mapping[str, Any]) -> str:
        """Weights digest of the version that a step's settings name as the reference; or empty."""
        version = settings.get(REFERENCE)
        return "" if version is None else self.digest_of(int(version))

    @property
    def references(self) -> set[int]:
        """Versions that stay because steps are replayed with them as their reference."""
        config = {} if self.run_started is None else self.run_started.config
        every = config.get("objective", {}).get("reference_every")
        return set(range(0, self.next_step + 2, every)) if every else set()

    def known(
        self, decision: TakeBatch | TakePart, *, run: str, after: TakeBatch | None = None
    ) -> Known:
        """As much of this history as the checks of a batch need; `after` is the batch of a step
        that was trained and is not committed yet, where there is one."""
        versions = {group.version for group in decision.groups}
        if self.interruptible and versions:
            versions.update(range(max(0, min(versions)), self.next_step + 1))
        exist = {version for version in versions if 0 <= version <= self.next_step}
        trained = {name: step for name, (step, _) in self.trained.items()}
        if after is not None:
            trained |= {group.group: after.step for group in after.groups}
        names = {group.group for group in decision.groups} & trained.keys()
        return Known(
            run=run,
            next_step=self.next_step if after is None else after.step + 1,
            digests={version: self.digest_of(version) for version in exist},
            interruptible=self.interruptible,
            trained={name: trained[name] for name in names},
        )

    def add(self, offset: int, commit: StepCommitted) -> bool:
        """Take in a commit; whether it counts.

        A step that is committed again under a higher attempt replaces the earlier commit: the
        orchestrator had ended that batch meanwhile (`fail-batch`) and rejected it. Any other
        commit of a step that is not the next one is rejected by the orchestrator too. What a
        commit drops is gone either way.
        """
        self.kept.difference_update(commit.dropped)
        if self.notes and commit.step == self.next_step - 1:
            if commit.attempt <= self.notes[-1].attempt:
                return False
            self.revoke()
        if commit.step != self.next_step:
            return False
        self.notes.append(
            CommitNote(
                step=commit.step,
                attempt=commit.attempt,
                offset=offset,
                digest=commit.digest_after,
                checkpoint=commit.checkpoint,
                whole=commit.whole,
                starts=smallest_offsets(commit),
            )
        )
        self.kept.add(commit.step + 1)
        self.decisions_next = commit.decisions_next
        self._remember(commit)
        return True

    def revoke(self) -> None:
        """Forget the last commit: it was rejected."""
        step = self.notes.pop().step
        self.kept.discard(step + 1)
        self.trained = {name: at for name, at in self.trained.items() if at[0] != step}

    def _remember(self, commit: StepCommitted) -> None:
        for group in commit.groups:
            self.trained[group.group] = (commit.step, group.deadline)
        past = [name for name, (_, deadline) in self.trained.items() if deadline < commit.step]
        for name in past:
            del self.trained[name]


def smallest_offsets(commit: StepCommitted) -> dict[int, int]:
    """The smallest offset that a commit took, by partition."""
    found: dict[int, int] = {}
    for taken in (one for group in commit.groups for one in group.trajectories):
        found[taken.partition] = min(taken.offset, found.get(taken.partition, taken.offset))
    return found


RECOVERY_CHECKPOINTS: Final = 2
"""The newest checkpoints stay whatever `keep_every` says: a restart begins at the newest one, and
at the one before it when the commit of that one was rejected or its file is damaged."""

DROPPED_MAX: Final = 1000
"""Versions that one commit drops; after a change of `keep_every` the next ones drop the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Names in the policy store: weights digests, of whole files and of patches, and sha256 of
    optimizer states."""

    weights: tuple[str, ...]
    optimizers: tuple[str, ...]


def retained(commits: Sequence[Blob | None], pins: Collection[int], keep_every: int) -> set[int]:
    """The versions that stay, of 0 and those that `commits` made: one per step, its checkpoint.

    These are 0, the newest and the one before it (the last commit may yet be rejected), every
    pinned one, every `keep_every`-th checkpoint, and the newest checkpoints. With `keep_every` 0
    everything stays.
    """
    newest = len(commits)
    if keep_every == 0:
        return set(range(newest + 1))
    checkpoints = [step + 1 for step, checkpoint in enumerate(commits) if checkpoint is not None]
    kept = checkpoints[keep_every - 1 :: keep_every] + checkpoints[-RECOVERY_CHECKPOINTS:]
    pinned = (version for version in pins if 0 <= version <= newest)
    return {0, max(0, newest - 1), newest, *pinned, *kept}


def droppable(
    history: CommitHistory, checkpoint: Blob | None, pins: Collection[int], keep_every: int
) -> tuple[int, ...]:
    """What the commit after `history`, with this checkpoint, drops: the oldest first."""
    if keep_every == 0:
        return ()
    commits = [note.checkpoint for note in history.notes]
    kept = retained([*commits, checkpoint], pins, keep_every)
    return tuple(sorted(history.kept - kept - history.references)[:DROPPED_MAX])


def made_again(run: str, versions: Collection[int]) -> str:
    """What to say of versions that were dropped: which, and how one has them."""
    first, last = min(versions), max(versions)
    if len(versions) == 1:
        return f"version {first}; `dora-pipe export policy {run} {first} DIR` makes it again"
    return (
        f"{len(versions)} of the versions {first} to {last}; "
        f"`dora-pipe export policy {run} N DIR` makes any of them again"
    )


def underlying(history: CommitHistory, versions: Collection[int]) -> set[int]:
    """These versions and those that they are made of by patches: down to a whole one each."""
    return made_of(versions, lambda at: at <= 0 or history.notes[at - 1].whole)


def made_of(versions: Collection[int], whole: Callable[[int], bool]) -> set[int]:
    """As `underlying`; `whole` says of a version whether it is there without the one before it."""
    found: set[int] = set()
    for version in versions:
        at = version
        while at not in found:
            found.add(at)
            if not whole(at):
                at -= 1
    return found


def files_of(history: CommitHistory, dropped: Collection[int]) -> Files:
    """The files of versions that were dropped; without those that a kept version has too, or is
    made of. With them go those that only they were made of."""
    kept = underlying(history, history.kept)
    gone = underlying(history, history.kept | set(dropped)) - kept
    weights = {history.digest_of(version) for version in gone}
    weights -= {history.digest_of(version) for version in kept}
    blobs = {history.checkpoint_of(version) for version in history.kept}
    optimizers = {history.checkpoint_of(version) for version in dropped} - blobs - {""}
    return Files(weights=tuple(sorted(weights)), optimizers=tuple(sorted(optimizers)))
