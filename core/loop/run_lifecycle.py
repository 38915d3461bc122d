"""Checks of a role before it begins: the run has started, is not over, and all acknowledged records
are readable.

An unfinished append of a dead exclusive writer hides later records until its successor or the
broker ends it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from typing import Final

from dora_pipe.bus.base import records_until
from dora_pipe.bus.bus import HELD_LIMIT_S, Bus
from dora_pipe.core.errors import BusError, SchemaError, UsageError
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.control import RunStarted, decode_control
from dora_pipe.schemas.rounds import StopRun, decode_round
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

RUN_WAIT_S: Final = 120.0
"""Maximum wait for the run's start."""

LOOK_BACK: Final = 64
"""Offsets before the end of decisions that contain the last round; aborted transactions take one
too."""

POLL_S: Final = 0.25


def wait_for_run(
    bus: Bus, topics: Topics, stop: Callable[[], bool], clock: Clock
) -> RunStarted | None:
    """Return the run's first record; None if `stop` returns True before.

    Raises UsageError after `RUN_WAIT_S`, BusError, SchemaError, InvariantBroken for a changed
    configuration.
    """
    give_up_ns = clock.now_ns() + int(RUN_WAIT_S * 1e9)
    reported = False
    while not stop():
        started = _run_started(bus, topics, clock)
        if started is not None:
            started.check_config()
            return started
        if clock.now_ns() >= give_up_ns:
            raise UsageError(
                f"run {topics.run} did not start within {RUN_WAIT_S:.0f} s",
                hint="start it with `dora-pipe run`, or start its orchestrator, on the same bus",
            )
        if not reported:
            LOG.info("waiting for run %s to start", topics.run)
            reported = True
        clock.sleep(POLL_S)
    return None


def run_is_over(bus: Bus, topics: Topics, end: int, clock: Clock) -> bool:
    """Return whether a round before `end` of decisions stopped the run. Raises BusError.

    No record follows that round.
    """
    partition = TopicPartition(topics.decisions, 0)
    first = max(
        retry_bus("looking for the last round", lambda: bus.begin(partition), clock),
        end - LOOK_BACK,
    )
    over = False
    for record in records_between(bus, partition, first, end, clock):
        with suppress(SchemaError):  # foreign record; round readers report it
            decisions = decode_round(record.value).decisions
            over = over or any(isinstance(decision, StopRun) for decision in decisions)
    return over


def _run_started(bus: Bus, topics: Topics, clock: Clock) -> RunStarted | None:
    partition = TopicPartition(topics.control, 0)
    if topics.control not in retry_bus("looking for the run", bus.topics, clock):
        return None
    end = retry_bus("looking for the run", lambda: bus.end(partition), clock)
    with closing(records_between(bus, partition, 0, end, clock)) as records:
        for record in records:
            if b'"run-started"' in record.value:
                decoded = decode_control(record.value)
                if isinstance(decoded, RunStarted):
                    return decoded
    return None


def records_between(
    bus: Bus, partition: TopicPartition, first: int, end: int, clock: Clock
) -> Generator[Record, None, None]:
    """Yield records from `first` to `end`, retrying. Raises BusError."""
    what = f"reading {partition.topic}"
    with closing(retry_bus(what, lambda: bus.reader({partition: first}), clock)) as reader:
        yield from records_until(
            reader, {partition: end}, attempt=lambda poll: retry_bus(what, poll, clock)
        )


LOOK_S: Final = 0.25


def await_stable_offset(bus: Bus, partitions: Sequence[TopicPartition], clock: Clock) -> None:
    """Return when everything acknowledged before this call is readable.

    Call after opening an exclusive writer, before reading to `Bus.end`. Raises BusError, also after
    `HELD_LIMIT_S`.
    """
    ends = {partition: _patient(bus.written_end, partition, clock) for partition in partitions}
    give_up_ns = clock.now_ns() + int(HELD_LIMIT_S * 1e9)
    reported = False
    while held := [
        partition for partition, end in ends.items() if _patient(bus.end, partition, clock) < end
    ]:
        topics = ", ".join(sorted({partition.topic for partition in held}))
        if clock.now_ns() >= give_up_ns:
            raise BusError(
                f"{topics}: acknowledged records cannot be read, because an append before them "
                f"is open for {HELD_LIMIT_S:.0f} s without an end",
                hint="`kafka-transactions.sh --bootstrap-server HOST:PORT list` shows open "
                "transactions; its `abort` ends one",
            )
        if not reported:
            LOG.warning(
                "waiting for the log to end an append that a dead role left open in %s (at most "
                "%.0f s)",
                topics,
                HELD_LIMIT_S,
            )
            reported = True
        clock.sleep(LOOK_S)
    if reported:
        LOG.info("all records are readable again")


def _patient(ask: Callable[[TopicPartition], int], partition: TopicPartition, clock: Clock) -> int:
    return retry_bus("reading the log's end", lambda: ask(partition), clock)
