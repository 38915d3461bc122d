"""Look up the run's first record, and the policy after a step."""

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


def first_record(bus: Bus, topics: Topics) -> RunStarted:
    """Return the run's first record. Raises UsageError before the start."""
    partition = TopicPartition(topics.control, 0)
    with closing(records_of(bus, {partition: bus.end(partition)})) as records:
        for record in records:
            with suppress(SchemaError):
                fact = decode_control(record.value)
                if isinstance(fact, RunStarted):
                    return fact
    raise UsageError(f"run {topics.run} has not started", hint="start it with `dora-pipe run`")


def policy_after(bus: Bus, topics: Topics, version: int) -> Manifest:
    """Return the manifest of a version. Raises UsageError if it is missing."""
    if version == 0:
        return first_record(bus, topics).policy
    clock = SystemClock()
    notes = read_history(bus, topics, clock).notes
    for commit in read_commits(bus, topics, notes[version - 1 : version], clock):
        return commit.policy
    raise UsageError(
        f"run {topics.run} has no version {version}", hint=f"its newest version is {len(notes)}"
    )
