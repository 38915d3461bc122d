"""Reader of committed steps in control; keeps one note per commit to bound memory."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.place_reader import read_until
from dora_pipe.consumers.trainer.commits import CommitHistory, CommitNote
from dora_pipe.core.errors import InvariantBroken, LogTruncated, SchemaError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import (
    RoleStarted,
    RunStarted,
    StepCommitted,
    VersionsDropped,
    decode_control,
)
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

_KINDS: Final = (b'"run-started"', b'"role-started"', b'"step-committed"', b'"versions-dropped"')


def read_history(bus: Bus, topics: Topics, clock: Clock) -> CommitHistory:
    """Return the history from control. Raises BusError, LogTruncated."""
    history = CommitHistory()
    for record in _records(bus, topics, clock, start=0):
        decoded = _decode(record)
        if isinstance(decoded, RunStarted):
            if history.run_started is None:
                history.run_started = decoded
        elif isinstance(decoded, RoleStarted) and decoded.role == "trainer":
            history.incarnation = max(history.incarnation, decoded.incarnation)
        elif isinstance(decoded, VersionsDropped):
            history.kept.difference_update(decoded.versions)
        elif isinstance(decoded, StepCommitted) and not history.add(record.offset, decoded):
            LOG.warning(
                "commit of step %d at offset %d does not count", decoded.step, record.offset
            )
    return history


def read_commits(
    bus: Bus, topics: Topics, notes: Sequence[CommitNote], clock: Clock
) -> Iterator[StepCommitted]:
    """Yield the commits of notes, in order. Raises LogTruncated, BusError."""
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
    raise LogTruncated(f"the commit of step {missing} is missing in {topics.control}")


def _decode(record: Record) -> object:
    if not any(kind in record.value for kind in _KINDS):
        return None
    try:
        return decode_control(record.value)
    except SchemaError as error:
        LOG.warning("control offset %d cannot be read: %s", record.offset, error.message)
        return None


def _records(bus: Bus, topics: Topics, clock: Clock, *, start: int) -> Iterator[Record]:
    at = TopicPartition(topics.control, 0)
    end = retry_bus("reading control", lambda: bus.end(at), clock)
    reader = retry_bus("reading control", lambda: bus.reader({at: start}), clock)
    try:
        yield from read_until(reader, at, end, clock)
    finally:
        reader.close()
