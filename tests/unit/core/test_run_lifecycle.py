"""Tests of waiting for a run to start and of its end."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.errors import BusError, InvariantBroken, UsageError
from dora_pipe.core.loop.run_lifecycle import (
    LOOK_BACK,
    POLL_S,
    RUN_WAIT_S,
    run_is_over,
    wait_for_run,
)
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.launch.plan import started
from dora_pipe.schemas.rounds import AnyDecision, Round, StopRun
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.trainer_driver import run_started
from tests.support.worker import VirtualClock

TOPICS = Topics("r")


def start(bus: MemoryBus) -> None:
    bus.create([TopicSpec(name=TOPICS.control)])
    bus.writer().append([Append(topic=TOPICS.control, value=encode(run_started()))])


class LateStart(VirtualClock):
    def __init__(self, bus: MemoryBus, at_ns: int) -> None:
        super().__init__()
        self.bus, self.at_ns = bus, at_ns

    def sleep(self, seconds: float) -> None:
        before = self.ns
        super().sleep(seconds)
        if before < self.at_ns <= self.ns:
            start(self.bus)


def test_run_whose_configuration_is_not_the_one_of_its_digest_is_not_obeyed() -> None:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=TOPICS.control)])
    forged = msgspec.structs.replace(run_started(), config={"sampling": {"temperature": 0.5}})
    bus.writer().append([Append(topic=TOPICS.control, value=encode(forged))])
    with pytest.raises(InvariantBroken, match="the configuration in `run started` of r was chang"):
        wait_for_run(bus, TOPICS, lambda: False, VirtualClock())
    with pytest.raises(
        InvariantBroken
    ):  # check of `run --resume` and of all commands that start roles
        started(bus, TOPICS)


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


def decide(bus: MemoryBus, ordinal: int, *decisions: AnyDecision) -> int:
    round_ = Round(
        ordinal=ordinal, incarnation=0, now_ns=ordinal, control_next=0, decisions=decisions
    )
    bus.writer().append([Append(topic=TOPICS.decisions, value=encode(round_))])
    return bus.end(TopicPartition(TOPICS.decisions, 0))


def test_run_whose_last_round_stops_it_is_over_and_was_not_before() -> None:
    bus, clock = MemoryBus(MemoryLog()), VirtualClock()
    bus.create([TopicSpec(name=TOPICS.decisions)])
    assert not run_is_over(bus, TOPICS, 0, clock)
    before = [decide(bus, ordinal) for ordinal in range(2 * LOOK_BACK)][-1]
    assert not run_is_over(bus, TOPICS, before, clock)
    after = decide(bus, 2 * LOOK_BACK, StopRun(reason="enough"))
    assert run_is_over(bus, TOPICS, after, clock)
    assert clock.ns == 0


def test_records_that_do_not_come_are_not_awaited_without_end() -> None:
    class Lost(MemoryBus):
        def end(self, tp: TopicPartition) -> int:
            return 3

    bus = Lost(MemoryLog())
    bus.create([TopicSpec(name=TOPICS.control), TopicSpec(name=TOPICS.decisions)])
    with pytest.raises(BusError, match=r"timed out reading r\.decisions/0: no record came at"):
        run_is_over(bus, TOPICS, 3, VirtualClock())
    with pytest.raises(BusError, match=r"timed out reading r\.control/0: no record came at"):
        wait_for_run(bus, TOPICS, lambda: False, VirtualClock())


def test_a_foreign_record_among_the_last_rounds_does_not_hide_that_the_run_is_over() -> None:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=TOPICS.decisions)])
    decide(bus, 0, StopRun(reason="enough"))
    bus.writer().append([Append(topic=TOPICS.decisions, value=b"garbage")])
    assert run_is_over(bus, TOPICS, 2, VirtualClock())
