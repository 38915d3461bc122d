"""Plan and delete unneeded files of a policy store and unreferenced blobs.

A trainer may be about to commit a file. So an unfinished run is pruned only if its user says that
no trainer is running, and only of orphans and leftovers. A blob is written before the record that
names it, so an unreferenced one must be older than `AGE_MIN_S`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.blobs import BlobBus, blob_of, may_be_blob
from dora_pipe.bus.bus import Bus
from dora_pipe.config.retention import keep_every_of
from dora_pipe.consumers.trainer.commits import CommitHistory, rebuild_note, retained, underlying
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.errors import InvariantBroken, LogTruncated, UsageError
from dora_pipe.core.loop.run_lifecycle import await_stable_offset
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import VersionsDropped
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import DIGEST, encode
from dora_pipe.store.copies import MADE
from dora_pipe.store.files import Listed
from dora_pipe.store.names import blob_name, delta_name, digest_in, weights_name
from dora_pipe.store.store import PolicyStore

Why = Literal["orphan", "copy", "dropped before", "retention", "unreferenced"]
"""`copy`: rebuildable full checkpoint; `unreferenced`: blob."""

STOP_RUN: Final = b'"kind":"stop-run"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCandidate:
    file: Listed
    why: Why
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    candidates: tuple[PruneCandidate, ...] = ()
    versions: tuple[int, ...] = ()
    """Dropped now by retention."""
    files: int = 0
    """All files of the store, or all blobs."""
    bytes: int = 0
    note: str = ""
    """Dropped versions, or why old blobs stay; may be empty."""

    @property
    def freed_bytes(self) -> int:
        return sum(candidate.file.bytes for candidate in self.candidates)


def plan_prune(
    bus: Bus,
    topics: Topics,
    store: PolicyStore,
    *,
    keep_every: int | Literal["auto"],
    stopped: bool,
    clock: Clock,
    keep: Collection[int] = (),
) -> PrunePlan:
    """Plan without changes.

    `stopped`: the user says that no trainer is running; `keep`: versions to keep.

    The store is listed before the log is read, so that later commits are seen. Raises UsageError
    for a run that may be running, ResourceError, BusError.
    """
    listed = store.everything()
    await_stable_offset(bus, [TopicPartition(topics.control, 0)], clock)
    history = read_history(bus, topics, clock)
    if history.run_started is None:
        raise InvariantBroken(f"{topics.control} has no `run started`")
    finished = _is_finished(bus, topics, history)
    if not finished and not stopped:
        raise UsageError(
            f"run {topics.run} is not finished: its trainer may be about to name a file",
            hint="wait for its end, or say --stopped if no role of it is running",
        )
    versions: tuple[int, ...] = ()
    if finished:
        commits = [note.checkpoint for note in history.notes]
        every = keep_every_of(keep_every, history.run_started)
        stays = retained(commits, (len(commits),), every) | history.references | set(keep)
        versions = tuple(sorted(history.kept - stays))
    kept = history.kept.difference(versions)
    dropped = set(range(history.next_step + 1)) - kept - {0}
    candidates = tuple(_candidates(bus, topics, history, clock, listed, kept, frozenset(versions)))
    return PrunePlan(
        candidates=candidates,
        versions=versions,
        note=f"not kept: {rebuild_note(topics.run, dropped)}" if dropped else "",
        files=len(listed),
        bytes=sum(file.bytes for file in listed),
    )


def prune(
    bus: Bus, topics: Topics, store: PolicyStore, plan: PrunePlan, *, user: str, clock: Clock
) -> int:
    """Log the dropped versions, delete the files, return their number. Raises BusError before any
    deletion, ResourceError."""
    if plan.versions:
        record = VersionsDropped(at_ns=clock.wall_ns(), user=user, versions=plan.versions)
        with closing(bus.writer()) as writer:
            writer.append([Append(topic=topics.control, key=b"user", value=encode(record))])
    return sum(store.remove(candidate.file) for candidate in plan.candidates)


def _candidates(
    bus: Bus,
    topics: Topics,
    history: CommitHistory,
    clock: Clock,
    listed: list[Listed],
    kept: set[int],
    now: frozenset[int],
) -> Iterator[PruneCandidate]:
    assert history.run_started is not None
    named = {history.run_started.assets_digest}
    if history.run_started.optimizer is not None:
        named.add(history.run_started.optimizer.sha256)
    for commit in read_commits(bus, topics, history.notes, clock):
        named.add(commit.contributions.sha256)
    needed = {name for version in kept for name in _names(history, version)}
    needed |= {n for version in underlying(history, kept) for n in _weights(history, version)}
    of = {
        name: version
        for version in range(history.next_step + 1)
        for name in _names(history, version)
        if name not in needed
    }
    for file in listed:
        if file.name in needed or digest_in(file.name) in named:
            continue
        if file.name.startswith(f"{MADE}/"):
            yield PruneCandidate(file=file, why="copy")
            continue
        version = of.get(file.name)
        if version is None:
            yield PruneCandidate(file=file, why="orphan")
        else:
            why: Why = "retention" if version in now else "dropped before"
            yield PruneCandidate(file=file, why=why, version=version)


def _names(history: CommitHistory, version: int) -> list[str]:
    names = _weights(history, version)
    if sha256 := history.checkpoint_of(version):
        names.append(blob_name("optimizer", sha256))
    return names


def _weights(history: CommitHistory, version: int) -> list[str]:
    digest = history.digest_of(version)
    return [weights_name(digest), delta_name(digest)]


def _is_finished(bus: Bus, topics: Topics, history: CommitHistory) -> bool:
    decisions = TopicPartition(topics.decisions, 0)
    ends = {decisions: bus.end(decisions)}
    with closing(records_of(bus, ends, start=history.decisions_next)) as records:
        return any(STOP_RUN in record.value for record in records)


AGE_MIN_S: Final = 3600.0
"""Appends give up after 120 s; the rest covers clock skew and frozen machines."""

_OURS: Final = re.compile(rf"{DIGEST.pattern}|\..*")
"""Digests and unfinished files; nothing else is deleted."""


def plan_blobs(
    bus: Bus, topics: Topics, store: PolicyStore, *, clock: Clock, age_min_s: float = AGE_MIN_S
) -> PrunePlan:
    """Plan blob deletion; reads the log only if a blob is old enough. Raises ResourceError,
    BusError."""
    listed = store.blobs()
    latest_ns = clock.wall_ns() - int(age_min_s * 1e9)
    ours = (blob for blob in listed if _OURS.fullmatch(_last(blob)))
    old = [blob for blob in ours if 0 < blob.modified_ns <= latest_ns]
    candidates: tuple[PruneCandidate, ...] = ()
    note = ""
    if old:
        try:
            named = set(_named_in_log(bus, topics))
            candidates = tuple(
                PruneCandidate(file=blob, why="unreferenced")
                for blob in old
                if _last(blob) not in named
            )
        except LogTruncated as error:
            note = f"{len(old)} blobs are left as they are: {error.message}"
    return PrunePlan(
        candidates=candidates,
        files=len(listed),
        bytes=sum(blob.bytes for blob in listed),
        note=note,
    )


def prune_blobs(store: PolicyStore, plan: PrunePlan) -> int:
    """Delete the planned blobs that were not rewritten; return their number."""
    if not plan.candidates:
        return 0
    times = {blob.name: blob.modified_ns for blob in store.blobs()}
    same = [
        candidate
        for candidate in plan.candidates
        if times.get(candidate.file.name) == candidate.file.modified_ns
    ]
    return sum(store.remove(candidate.file) for candidate in same)


def _named_in_log(bus: Bus, topics: Topics) -> Iterator[str]:
    """Yield named blobs. Raises LogTruncated if retention deleted the log's beginning."""
    raw = bus.inner if isinstance(bus, BlobBus) else bus  # names without values
    for topic in filter(may_be_blob, topics.all()):
        for tp, end in ends_of(raw, topic).items():
            yield from filter(None, map(blob_of, records_of(raw, {tp: end})))


def _last(blob: Listed) -> str:
    return blob.name.rpartition("/")[2]
