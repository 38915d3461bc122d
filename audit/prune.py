"""Decides which files of a policy store nobody needs: orphans, leftovers, what retention drops.

Nothing else deletes what no commit names: a file may have been written by a trainer that is about
to commit it. So a run that is not finished is pruned only where its user says that no trainer of it
is running, and then only of orphans and leftovers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Final, Literal

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.port import Append, Bus, TopicPartition
from dora_pipe.consumers.trainer.commits import CommitHistory, retained
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.core.run_lifecycle import await_stable_offset
from dora_pipe.schemas.control import VersionsDropped
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.store.files import Listed
from dora_pipe.store.store import PolicyStore, blob_name, digest_in, weights_name

Why = Literal["orphan", "dropped before", "retention", "unclaimed"]
"""The last one is `prune_claims`'s."""

STOP_RUN: Final = b'"kind":"stop-run"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneCandidate:
    """A file that nobody needs.

    Example: ``PruneCandidate(file=Listed(name="weights/ab.safetensors", bytes=9), why="orphan")``
    """

    file: Listed
    why: Why
    version: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePlan:
    """What `prune` would delete."""

    candidates: tuple[PruneCandidate, ...]
    versions: tuple[int, ...]
    """Those that retention drops now."""
    files: int
    """Of the whole store."""
    bytes: int

    @property
    def freed_bytes(self) -> int:
        """Room that becomes free."""
        return sum(one.file.bytes for one in self.candidates)


def plan_prune(
    bus: Bus,
    topics: Topics,
    store: PolicyStore,
    *,
    keep_every: int,
    stopped: bool,
    clock: Clock,
) -> PrunePlan:
    """Look; nothing is changed. `stopped`: the user says that no trainer of this run is running.

    The store is listed before the log is read: a commit that names a listed file is then seen.
    Raises UsageError for a run that may be living, ResourceError, BusError.
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
        versions = tuple(sorted(history.kept - retained(commits, (len(commits),), keep_every)))
    kept = history.kept.difference(versions)
    candidates = tuple(_candidates(bus, topics, history, clock, listed, kept, frozenset(versions)))
    return PrunePlan(
        candidates=candidates,
        versions=versions,
        files=len(listed),
        bytes=sum(one.bytes for one in listed),
    )


def prune(
    bus: Bus,
    topics: Topics,
    store: PolicyStore,
    plan: PrunePlan,
    *,
    user: str,
    clock: Clock,
    told: Callable[[PruneCandidate], None] = lambda candidates: None,
) -> int:
    """Delete what a plan names; how many files there were. First the log says which versions go.

    Raises BusError (then nothing is deleted), ResourceError.
    """
    if plan.versions:
        record = VersionsDropped(at_ns=clock.wall_ns(), user=user, versions=plan.versions)
        with closing(bus.writer()) as writer:
            writer.append([Append(topic=topics.control, key=b"user", value=encode(record))])
    count = 0
    for one in plan.candidates:
        if store.remove(one.file):
            count += 1
            told(one)
    return count


def _candidates(
    bus: Bus,
    topics: Topics,
    history: CommitHistory,
    clock: Clock,
    listed: list[Listed],
    kept: set[int],
    now: frozenset[int],
) -> Iterator[PruneCandidate]:
    """Files by name: kept, of a dropped version, or nobody's."""
    assert history.run_started is not None
    named = {history.run_started.assets_digest}
    for commit in read_commits(bus, topics, history.notes, clock):
        named.add(commit.contributions.sha256)
    stays = {name for version in kept for name in _names(history, version)}
    of = {
        name: version
        for version in range(history.next_step + 1)
        for name in _names(history, version)
        if name not in stays
    }
    for file in listed:
        if file.name in stays or digest_in(file.name) in named:
            continue
        version = of.get(file.name)
        if version is None:
            yield PruneCandidate(file=file, why="orphan")
        else:
            why: Why = "retention" if version in now else "dropped before"
            yield PruneCandidate(file=file, why=why, version=version)


def _names(history: CommitHistory, version: int) -> list[str]:
    """The files of a version."""
    names = [weights_name(history.digest_of(version))]
    if sha256 := history.checkpoint_of(version):
        names.append(blob_name("optimizer", sha256))
    return names


def _is_finished(bus: Bus, topics: Topics, history: CommitHistory) -> bool:
    """Whether the orchestrator has ended the run; that comes after the last batch."""
    decisions = TopicPartition(topics.decisions, 0)
    ends = {decisions: bus.end(decisions)}
    with closing(records_of(bus, ends, start=history.decisions_next)) as records:
        return any(STOP_RUN in record.value for record in records)
