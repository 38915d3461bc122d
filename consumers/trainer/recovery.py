"""Reader of committed steps in control, and the snapshot that shortens a restart.

The snapshot is a disposable cache of the history up to a commit with a checkpoint. It is used only
if its last commit is in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.trainer.commits import CommitHistory, CommitNote, decode_history
from dora_pipe.core.errors import InvariantBroken, LogTruncated, SchemaError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import records_between
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.durable import write_atomically
from dora_pipe.schemas.control import StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)
_KINDS: Final = (b'"run-started"', b'"role-started"', b'"step-committed"', b'"versions-dropped"')


def read_history(
    bus: Bus, topics: Topics, clock: Clock, snapshot: Path | None = None
) -> CommitHistory:
    """Return the history from control, read after the snapshot if that matches the log. Raises
    BusError, LogTruncated."""
    history = None if snapshot is None else _load(snapshot)
    if history is not None:
        last = history.notes[-1]
        with closing(_records(bus, topics, clock, start=last.offset)) as records:
            if _has_commit(next(records, None), last):
                return _folded(history, records)
        LOG.debug("snapshot skipped: control offset %d differs from its last commit", last.offset)
    with closing(_records(bus, topics, clock, start=0)) as records:
        return _folded(CommitHistory(), records)


def write_snapshot(path: Path, content: bytes) -> None:
    """Write atomically; without a snapshot a restart reads all of control."""
    try:
        write_atomically(path, content)
    except OSError as error:
        LOG.warning("no snapshot of the commits: %s", error)


def _load(snapshot: Path) -> CommitHistory | None:
    try:
        return decode_history(snapshot.read_bytes())
    except (OSError, ValueError) as error:
        LOG.debug("snapshot skipped: %s", error)
        return None


def _has_commit(record: Record | None, note: CommitNote) -> bool:
    commit = None if record is None else _decode(record)
    return (
        record is not None
        and isinstance(commit, StepCommitted)
        and CommitNote.of(record.offset, commit) == note
    )


def _folded(history: CommitHistory, records: Iterator[Record]) -> CommitHistory:
    for record in records:
        history.fold(record.offset, _decode(record))
    return history


def read_commits(
    bus: Bus, topics: Topics, notes: Sequence[CommitNote], clock: Clock
) -> Iterator[StepCommitted]:
    """Yield the commits of notes, in order. Raises LogTruncated, BusError."""
    if not notes:
        return
    unread = {note.offset: note for note in notes}
    with closing(_records(bus, topics, clock, start=notes[0].offset)) as records:
        for record in records:
            note = unread.pop(record.offset, None)
            if note is None:
                continue
            commit = _decode(record)
            if not isinstance(commit, StepCommitted) or commit.step != note.step:
                raise InvariantBroken(f"control offset {record.offset} is no commit of {note.step}")
            yield commit
            if not unread:
                return
    missing = min(note.step for note in unread.values())
    raise LogTruncated(f"the commit of step {missing} is missing in {topics.control}")


def _decode(record: Record) -> object:
    if not any(kind in record.value for kind in _KINDS):
        return None
    try:
        return decode_control(record.value)
    except SchemaError as error:
        LOG.warning("control offset %d cannot be read: %s", record.offset, error.message)
        return None


def _records(
    bus: Bus, topics: Topics, clock: Clock, *, start: int
) -> Generator[Record, None, None]:
    control = TopicPartition(topics.control, 0)
    end = retry_bus("reading control", lambda: bus.end(control), clock)
    if start < end:
        yield from records_between(bus, control, start, end, clock)
