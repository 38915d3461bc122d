"""Reads what control says of a run's committed steps; what it means is `commits`'s.

Control is read once, from its beginning, and of each commit only a note is kept (which step, where
it lies, which weights, whether there is a checkpoint), so that memory does not grow with batches.
The commits that must be replayed are read again, one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Final

from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.clock import Clock
from dora_pipe.consumers.commits import CommitNote, History
from dora_pipe.errors import BusError, InvariantBroken, LogTruncated, SchemaError
from dora_pipe.patience import patiently
from dora_pipe.schemas.control import (
    RoleStarted,
    RunStarted,
    StepCommitted,
    VersionsDropped,
    decode_control,
)
from dora_pipe.schemas.topics import Topics

__all__ = ["CommitNote", "History", "read_commits", "read_history"]

LOG = logging.getLogger(__name__)

POLL_S: Final = 1.0
"""One wait for records that are known to be there."""

EMPTY_POLLS_MAX: Final = 60
"""So many waits in vain, one after the other, and the log counts as unreachable."""

_KINDS: Final = (b'"run-started"', b'"role-started"', b'"step-committed"', b'"versions-dropped"')
"""Most control records are none of these and cost no decoding."""


def read_history(bus: Bus, topics: Topics, clock: Clock) -> History:
    """The history of a run as control has it now. Raises BusError, LogTruncated."""
    history = History()
    for record in _records(bus, topics, clock, start=0):
        decoded = _decode(record)
        if isinstance(decoded, RunStarted):
            history.run_started = history.run_started or decoded
        elif isinstance(decoded, RoleStarted) and decoded.role == "trainer":
            history.role_epoch = max(history.role_epoch, decoded.role_epoch)
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
