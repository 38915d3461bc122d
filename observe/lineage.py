"""Look up the policy after a step, and the run's first record."""

from __future__ import annotations

from contextlib import closing, suppress

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.core.errors import SchemaError, UsageError
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.schemas.control import RunStarted, decode_control
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics


def newest_version(bus: Bus, topics: Topics) -> int:
    """Return the newest version; 0 before the first step. Raises BusError, LogTruncated."""
    return read_history(bus, topics, SystemClock()).next_step


def policy_after(bus: Bus, topics: Topics, version: int) -> tuple[RunStarted, Manifest]:
    """Return the first record and the manifest of a version. Raises UsageError if missing."""
    first, newest, clock = run_started_in(bus, topics), -1, SystemClock()
    if first is not None and version == 0:
        return first, first.policy
    if first is not None:
        notes = read_history(bus, topics, clock).notes
        newest = len(notes)
        for commit in read_commits(bus, topics, notes[version - 1 : version], clock):
            return first, commit.policy
    raise UsageError(
        f"run {topics.run} has no version {version}", hint=f"its newest version is {newest}"
    )


def run_started_in(bus: Bus, topics: Topics) -> RunStarted | None:
    partition = TopicPartition(topics.control, 0)
    with closing(records_of(bus, {partition: bus.end(partition)})) as records:
        for record in records:
            with suppress(SchemaError):
                fact = decode_control(record.value)
                if isinstance(fact, RunStarted):
                    return fact
    return None
