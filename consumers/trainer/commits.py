"""Committed steps of a run, and retention of versions; see docs/storage.md.

Keeps notes, not batches, to bound memory. Only the trainer deletes, after a commit that names the
dropped versions. A commit's pins suffice: dispatches and workers use the newest version or one of
an open group, so an older unpinned version is never pinned later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

import dora_pipe.schemas.control
from dora_pipe.config.logged import REFERENCE
from dora_pipe.consumers.trainer.checks import Known
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted, VersionsDropped
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import TakeBatch, TakePart
from dora_pipe.schemas.wire import sha256_hex

LOG = logging.getLogger(__name__)
CHANGED_SHARE: Final = "changed_share"
DELTA_SHARE: Final = "delta_share"
OF_DELTAS: Final = frozenset({CHANGED_SHARE, DELTA_SHARE})
"""Storage metrics: changed share of the weights, delta bytes relative to a full checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """A committed step; `offset` locates its commit, `digest` its weights."""

    step: int
    attempt: int
    offset: int
    digest: str
    checkpoint: Blob | None
    full: bool = True
    """False if stored only as a delta."""
    starts: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, offset: int, commit: StepCommitted) -> CommitNote:
        return cls(
            step=commit.step,
            attempt=commit.attempt,
            offset=offset,
            digest=commit.digest_after,
            checkpoint=commit.checkpoint,
            full=commit.full,
            starts=smallest_offsets(commit),
        )


@dataclass(slots=True, kw_only=True)
class CommitHistory:
    """Committed steps, contiguous from 0."""

    run_started: RunStarted | None = None
    incarnation: int = -1
    """Newest trainer incarnation, or -1."""
    notes: list[CommitNote] = field(default_factory=list)
    decisions_next: int = 0
    trained: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(step, deadline) by group, until the deadline passes."""
    kept: set[int] = field(default_factory=lambda: {0})

    @property
    def starts(self) -> dict[int, int]:
        """Return, by partition, the first offset of the last commit using it."""
        return {
            partition: offset for note in self.notes for partition, offset in note.starts.items()
        }

    def starts_from(self, step: int) -> dict[int, int]:
        """Return, by partition, the smallest offset since this step."""
        offsets: dict[int, int] = {}
        for note in self.notes[step:]:
            for partition, offset in note.starts.items():
                offsets[partition] = min(offset, offsets.get(partition, offset))
        return offsets

    @property
    def next_step(self) -> int:
        """Return the first uncommitted step."""
        return len(self.notes)

    def digest_of(self, version: int) -> str:
        assert self.run_started is not None
        if version == 0:
            return self.run_started.policy.digest
        return self.notes[version - 1].digest

    def checkpoint(self, version: int) -> Blob | None:
        """Return the optimizer state of a version, if kept."""
        if version:
            return self.notes[version - 1].checkpoint
        return None if self.run_started is None else self.run_started.optimizer

    def checkpoint_of(self, version: int) -> str:
        """Return its sha256, or empty."""
        blob = self.checkpoint(version)
        return "" if blob is None else blob.sha256

    @property
    def partial_rollout(self) -> bool:
        """Return whether trajectories may mix versions; a frozen key."""
        assert self.run_started is not None
        return bool(self.run_started.config.get("staleness", {}).get("partial_rollout", False))

    def reference_of(self, settings: Mapping[str, Any]) -> str:
        """Return the reference's weights digest, or empty."""
        version = settings.get(REFERENCE)
        return "" if version is None else self.digest_of(int(version))

    @property
    def references(self) -> set[int]:
        """Return the versions kept as references for replay."""
        config = {} if self.run_started is None else self.run_started.config
        every = config.get("objective", {}).get("reference_every")
        return set(range(0, self.next_step + 2, every)) if every else set()

    def known(
        self, decision: TakeBatch | TakePart, *, run: str, after: TakeBatch | None = None
    ) -> Known:
        """Return inputs of `check_batch`; `after` is a trained, uncommitted batch."""
        versions = {group.version for group in decision.groups}
        if self.partial_rollout and versions:
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
            partial_rollout=self.partial_rollout,
            trained={name: trained[name] for name in names},
        )

    def fold(self, offset: int, record: object) -> None:
        """Apply a record of control."""
        if isinstance(record, RunStarted):
            self.run_started = self.run_started or record
        elif isinstance(record, RoleStarted) and record.role == "trainer":
            self.incarnation = max(self.incarnation, record.incarnation)
        elif isinstance(record, VersionsDropped):
            self.kept.difference_update(record.versions)
        elif isinstance(record, StepCommitted) and not self.add(offset, record):
            LOG.warning("commit of step %d at offset %d does not count", record.step, offset)

    def add(self, offset: int, commit: StepCommitted) -> bool:
        """Add a commit; return whether it counts.

        A higher attempt of the last step replaces its commit, rejected by the orchestrator
        (`fail-batch`). Other commits except of the next step are rejected; what they dropped is
        gone anyway.
        """
        self.kept.difference_update(commit.dropped)
        if self.notes and commit.step == self.next_step - 1:
            if commit.attempt <= self.notes[-1].attempt:
                return False
            self.revoke()
        if commit.step != self.next_step:
            return False
        self.notes.append(CommitNote.of(offset, commit))
        self.incarnation = max(self.incarnation, commit.incarnation)
        self.kept.add(commit.step + 1)
        self.decisions_next = commit.decisions_next
        self._remember(commit)
        return True

    def revoke(self) -> None:
        """Remove the last commit: it was rejected."""
        step = self.notes.pop().step
        self.kept.discard(step + 1)
        self.trained = {
            name: step_deadline
            for name, step_deadline in self.trained.items()
            if step_deadline[0] != step
        }

    def _remember(self, commit: StepCommitted) -> None:
        for group in commit.groups:
            self.trained[group.group] = (commit.step, group.deadline)
        past = [name for name, (_, deadline) in self.trained.items() if deadline < commit.step]
        for name in past:
            del self.trained[name]


def encode_history(history: CommitHistory) -> bytes:
    """Return a snapshot: a line that seals the body, and the history as JSON."""
    body = msgspec.json.encode(history)
    return _seal(body) + b"\n" + body


def decode_history(content: bytes) -> CommitHistory:
    """Return the history of a snapshot. Raises ValueError if damaged or from other code."""
    seal, _, body = content.partition(b"\n")
    if seal != _seal(body):
        raise ValueError("damaged, or written by other code")
    return msgspec.json.decode(body, type=CommitHistory)


def _seal(body: bytes) -> bytes:
    return sha256_hex(_source(), body).encode()


@cache
def _source() -> bytes:
    """Return the code that folds commits and decodes control."""
    files = (__file__, dora_pipe.schemas.control.__file__)
    return b"".join(Path(file).read_bytes() for file in files)


def smallest_offsets(commit: StepCommitted) -> dict[int, int]:
    """Return the smallest offset taken, by partition."""
    offsets: dict[int, int] = {}
    for taken in (trajectory for group in commit.groups for trajectory in group.trajectories):
        offsets[taken.partition] = min(taken.offset, offsets.get(taken.partition, taken.offset))
    return offsets


RECOVERY_CHECKPOINTS: Final = 2
"""Newest checkpoints always kept: the last may be rejected or damaged."""

DROPPED_MAX: Final = 1000
"""Versions dropped per commit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Weights digests, and sha256 of optimizer states, in the policy store."""

    weights: tuple[str, ...]
    optimizers: tuple[str, ...]


def retained(commits: Sequence[Blob | None], pins: Collection[int], keep_every: int) -> set[int]:
    """Return the versions to keep, given the checkpoint of each step or None.

    Keeps 0, the two newest (the last commit may be rejected), pins, every `keep_every`-th
    checkpoint and the newest checkpoints; all if `keep_every` is 0.
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
    """Return the versions that the next commit drops, oldest first."""
    if keep_every == 0:
        return ()
    commits = [note.checkpoint for note in history.notes]
    kept = retained([*commits, checkpoint], pins, keep_every)
    return tuple(sorted(history.kept - kept - history.references)[:DROPPED_MAX])


def rebuild_note(run: str, versions: Collection[int]) -> str:
    """Return a message on dropped versions and how to rebuild them."""
    first, last = min(versions), max(versions)
    if len(versions) == 1:
        return f"version {first}; `dora-pipe export policy {run} {first} DIR` rebuilds it"
    return (
        f"{len(versions)} of the versions {first} to {last}; "
        f"`dora-pipe export policy {run} N DIR` rebuilds any of them"
    )


def underlying(history: CommitHistory, versions: Collection[int]) -> set[int]:
    """Return these versions and their delta bases, down to full ones."""
    return with_bases(versions, lambda version: version <= 0 or history.notes[version - 1].full)


def with_bases(versions: Collection[int], is_full: Callable[[int], bool]) -> set[int]:
    """Return as `underlying`; `is_full` reports a full checkpoint."""
    needed: set[int] = set()
    for version in versions:
        base = version
        while base not in needed:
            needed.add(base)
            if not is_full(base):
                base -= 1
    return needed


def files_of(history: CommitHistory, dropped: Collection[int]) -> Files:
    """Return the files of dropped versions and bases that no kept version needs."""
    kept = underlying(history, history.kept)
    unneeded = underlying(history, history.kept | set(dropped)) - kept
    weights = {history.digest_of(version) for version in unneeded}
    weights -= {history.digest_of(version) for version in kept}
    blobs = {history.checkpoint_of(version) for version in history.kept}
    optimizers = {history.checkpoint_of(version) for version in dropped} - blobs - {""}
    return Files(weights=tuple(sorted(weights)), optimizers=tuple(sorted(optimizers)))
