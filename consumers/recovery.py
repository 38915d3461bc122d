"""What control says of a run's committed steps; decides where a trainer goes on.

Control is read once, from its beginning, and of each commit only a note is kept (which step, where
it lies, which weights, whether there is a checkpoint), so that memory does not grow with batches.
The commits that must be replayed are read again, one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.clock import Clock
from dora_pipe.consumers.checks import Known
from dora_pipe.consumers.patience import patiently
from dora_pipe.errors import BusError, InvariantBroken, LogTruncated, SchemaError
from dora_pipe.schemas.control import RoleStarted, RunStarted, StepCommitted, decode_control
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import TakeBatch
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""One wait for records that are known to be there."""

EMPTY_POLLS_MAX: Final = 60
"""So many waits in vain, one after the other, and the log counts as unreachable."""

_KINDS: Final = (b'"run-started"', b'"role-started"', b'"step-committed"')
"""Most control records are none of these and cost no decoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitNote:
    """A committed step and where its commit lies in control."""

    step: int
    attempt: int
    offset: int
    digest: str
    """Weights after the step."""
    checkpoint: Blob | None


@dataclass(slots=True, kw_only=True)
class History:
    """The committed steps of a run, contiguous from 0, and what a restart needs beside them."""

    run_started: RunStarted | None = None
    role_epoch: int = -1
    """The newest of the trainer; -1 for none."""
    notes: list[CommitNote] = field(default_factory=list)
    decisions_next: int = 0
    """Where to go on in the decisions topic."""
    trained: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Group to (step, deadline), as long as the deadline is not past."""
    starts: dict[int, int] = field(default_factory=dict)
    """Per partition the smallest offset of the last commit that took from it."""

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

    def known(self, decision: TakeBatch, *, run: str) -> Known:
        """As much of this history as the checks of a batch need."""
        versions = {group.version for group in decision.groups}
        exist = {version for version in versions if 0 <= version <= self.next_step}
        names = {group.group for group in decision.groups} & self.trained.keys()
        return Known(
            run=run,
            next_step=self.next_step,
            digests={version: self.digest_of(version) for version in exist},
            trained={name: self.trained[name][0] for name in names},
        )

    def add(self, offset: int, commit: StepCommitted) -> bool:
        """Take in a commit; whether it counts.

        A step that is committed again under a higher attempt replaces the earlier commit: the
        orchestrator had ended that batch meanwhile (`fail-batch`) and rejected it. Any other
        commit of a step that is not the next one is rejected by the orchestrator too.
        """
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
            )
        )
        self.decisions_next = commit.decisions_next
        self._remember(commit)
        return True

    def revoke(self) -> None:
        """Forget the last commit: it was rejected."""
        step = self.notes.pop().step
        self.trained = {name: at for name, at in self.trained.items() if at[0] != step}

    def _remember(self, commit: StepCommitted) -> None:
        for group in commit.groups:
            self.trained[group.group] = (commit.step, group.deadline)
        past = [name for name, (_, deadline) in self.trained.items() if deadline < commit.step]
        for name in past:
            del self.trained[name]
        smallest: dict[int, int] = {}
        for taken in (one for group in commit.groups for one in group.trajectories):
            smallest[taken.partition] = min(
                taken.offset, smallest.get(taken.partition, taken.offset)
            )
        self.starts |= smallest


def read_history(bus: Bus, topics: Topics, clock: Clock) -> History:
    """The history of a run as control has it now. Raises BusError, LogTruncated."""
    history = History()
    for record in _records(bus, topics, clock, start=0):
        decoded = _decode(record)
        if isinstance(decoded, RunStarted):
            history.run_started = history.run_started or decoded
        elif isinstance(decoded, RoleStarted) and decoded.role == "trainer":
            history.role_epoch = max(history.role_epoch, decoded.role_epoch)
        elif isinstance(decoded, StepCommitted) and not history.add(record.offset, decoded):
            LOG.warning(
                "commit of step %d at offset %d does not count", decoded.step, record.offset
            )
    return history


def read_commits(
    bus: Bus, topics: Topics, notes: Sequence[CommitNote], clock: Clock
) -> Iterator[StepCommitted]:
    """The commits behind notes, in order. Raises LogTruncated when one is gone, BusError."""
    if not notes:
        return
    wanted = {note.offset: note for note in notes}
    for record in _records(bus, topics, clock, start=notes[0].offset):
        note = wanted.pop(record.offset, None)
        if note is None:
            continue
        commit = _decode(record)
        if not isinstance(commit, StepCommitted) or commit.step != note.step:
            raise InvariantBroken(f"control offset {record.offset} is no commit of {note.step}")
        yield commit
        if not wanted:
            return
    missing = min(note.step for note in wanted.values())
    raise LogTruncated(f"the commit of step {missing} is gone from {topics.control}")


def _decode(record: Record) -> object:
    """The record if it is of a kind that matters here; None for others and unreadable ones."""
    if not any(kind in record.value for kind in _KINDS):
        return None
    try:
        return decode_control(record.value)
    except SchemaError as error:
        LOG.warning("control offset %d cannot be read: %s", record.offset, error.message)
        return None


def _records(bus: Bus, topics: Topics, clock: Clock, *, start: int) -> Iterator[Record]:
    """Every control record from `start` that is there now."""
    at = TopicPartition(topics.control, 0)
    end = patiently("reading control", lambda: bus.end(at), clock)
    reader = patiently("reading control", lambda: bus.reader({at: start}), clock)
    empty = 0
    try:
        while reader.position(at) < end:
            polled = patiently("reading control", lambda: reader.poll(timeout_s=POLL_S), clock)
            yield from (record for record in polled if record.offset < end)
            empty = 0 if polled else empty + 1
            if empty > EMPTY_POLLS_MAX:
                raise BusError(f"{topics.control} has records that do not come")
    finally:
        reader.close()
