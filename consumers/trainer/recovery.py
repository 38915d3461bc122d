"""Reader of committed steps in control."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Final

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.trainer.commits import CommitHistory, CommitNote
from dora_pipe.core.errors import InvariantBroken, LogTruncated, SchemaError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.loop.run_lifecycle import records_between
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import StepCommitted, decode_control
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)
_KINDS: Final = (b'"run-started"', b'"role-started"', b'"step-committed"', b'"versions-dropped"')


def read_history(bus: Bus, topics: Topics, clock: Clock) -> CommitHistory:
    """Return the history from control. Raises BusError, LogTruncated."""
    history = CommitHistory()
    with closing(_records(bus, topics, clock, start=0)) as records:
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
