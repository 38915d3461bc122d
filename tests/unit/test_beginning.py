"""Waiting for a run to start: there already, later, never, and over a log that is away."""

from __future__ import annotations

import pytest

from dora_pipe.beginning import POLL_S, RUN_WAIT_S, wait_for_run
from dora_pipe.bus.memory import MemoryBus, MemoryLog, ScriptedFaults
from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.errors import UsageError
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.trainer_driver import run_started
from tests.support.worker import VirtualClock

TOPICS = Topics("r")


def start(bus: MemoryBus) -> None:
    bus.create([TopicSpec(name=TOPICS.control)])
    bus.writer().append([Append(topic=TOPICS.control, value=encode(run_started()))])


class LateStart(VirtualClock):
    """The run starts while somebody sleeps."""

    def __init__(self, bus: MemoryBus, at_ns: int) -> None:
        super().__init__()
        self.bus, self.at_ns = bus, at_ns

    def sleep(self, seconds: float) -> None:
        before = self.ns
        super().sleep(seconds)
        if before < self.at_ns <= self.ns:
            start(self.bus)


def test_run_that_has_started_is_found_without_waiting() -> None:
    bus, clock = MemoryBus(MemoryLog()), VirtualClock()
    start(bus)
    assert wait_for_run(bus, TOPICS, lambda: False, clock) == run_started()
    assert clock.ns == 0


def test_run_whose_topics_do_not_even_exist_is_waited_for() -> None:
    bus = MemoryBus(MemoryLog())
    clock = LateStart(bus, at_ns=int(10e9))
    assert wait_for_run(bus, TOPICS, lambda: False, clock) == run_started()
    assert 10e9 <= clock.ns <= (10 + POLL_S) * 1e9


def test_control_with_other_records_only_is_no_start() -> None:
    bus, clock = MemoryBus(MemoryLog()), VirtualClock()
    bus.create([TopicSpec(name=TOPICS.control)])
    bus.writer().append([Append(topic=TOPICS.control, value=b'{"kind":"later","at_ns":1}')])
    with pytest.raises(UsageError, match="run r did not start within 120 s") as caught:
        wait_for_run(bus, TOPICS, lambda: False, clock)
    assert caught.value.hint is not None
    assert clock.ns >= RUN_WAIT_S * 1e9


def test_stop_ends_the_wait() -> None:
    bus = MemoryBus(MemoryLog())
    assert wait_for_run(bus, TOPICS, lambda: True, VirtualClock()) is None


def test_log_that_is_away_for_a_moment_is_borne_with() -> None:
    log = MemoryLog()
    start(MemoryBus(log))
    away = MemoryBus(log, faults=ScriptedFaults(polls={0, 1}))
    assert wait_for_run(away, TOPICS, lambda: False, VirtualClock()) == run_started()
