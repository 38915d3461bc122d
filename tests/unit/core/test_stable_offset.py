"""Tests of waiting until acknowledged records are readable."""

from __future__ import annotations

import logging

import pytest

from dora_pipe.bus.bus import HELD_LIMIT_S, TopicSpec
from dora_pipe.bus.memory import AppendFault, MemoryBus, MemoryLog
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import BusError
from dora_pipe.core.loop.run_lifecycle import LOOK_S, await_stable_offset
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.orchestrator.process.role import Instance, start_machine
from dora_pipe.schemas.control import AnyControl
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.bus_steps import ScriptedFaults
from tests.support.orchestrator_world import WorldClock

TOPICS = Topics("tiny")
CONTROL = TopicPartition(TOPICS.control, 0)


class Bench:
    def __init__(self) -> None:
        self.clock, self.log = WorldClock(), MemoryLog()
        self.bus = MemoryBus(self.log, now_ms=self._now_ms)
        self.bus.create([TopicSpec(name=name) for name in TOPICS.all()])

    def hide(self, seconds: float, *control: AnyControl) -> None:
        late = AppendFault(kind="delayed", delay_ms=round(seconds * 1000))
        bus = MemoryBus(self.log, faults=ScriptedFaults(appends={0: late}), now_ms=self._now_ms)
        bus.writer().append(
            [Append(topic=CONTROL.topic, value=encode(record)) for record in control]
        )

    def _now_ms(self) -> int:
        return self.clock.ns // 1_000_000


def test_what_is_hidden_now_is_waited_for_and_what_is_hidden_later_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    bench.hide(30, records.run_started(records.make_config()))

    class Busy(WorldClock):
        def sleep(self, seconds: float) -> None:
            bench.clock.ns += int(seconds * 1e9)
            self.ns = bench.clock.ns
            if self.ns < 29e9:
                bench.hide(31, records.role_started("trainer", 0))

    with caplog.at_level(logging.INFO):
        await_stable_offset(bench.bus, [CONTROL], Busy())
    assert 30 <= bench.clock.ns / 1e9 < 30 + 2 * LOOK_S
    messages = [record.message for record in caplog.records]
    assert messages == [
        "waiting for the log to end an append that a dead role left open in tiny.control (at most "
        "120 s)",
        "all records are readable again",
    ]


def test_what_nobody_ends_is_one_error_with_a_way_out() -> None:
    bench = Bench()
    bench.hide(10 * HELD_LIMIT_S, records.role_started("trainer", 0))
    with pytest.raises(BusError, match=r"tiny\.control: acknowledged records cannot be") as error:
        await_stable_offset(bench.bus, [CONTROL], bench.clock)
    assert "kafka-transactions.sh" in str(error.value.hint)
    assert HELD_LIMIT_S <= bench.clock.ns / 1e9 < HELD_LIMIT_S + 1


def test_an_orchestrator_that_starts_folds_what_was_hidden_then() -> None:
    bench = Bench()
    config = records.make_config()
    bench.hide(5, records.run_started(config), records.role_started("orchestrator", 3))
    machine = start_machine(
        bus=bench.bus,
        writer=bench.bus.writer(exclusive="tiny.orchestrator"),
        topics=TOPICS,
        timing=config.timing,
        clock=bench.clock,
        instance=Instance(name="o", host="h", pid=1, package="0"),
        meter=Meter(),
        run_started=records.run_started(config),
    )
    assert machine._incarnation == 4
    history = read_history(bench.bus, TOPICS, bench.clock)
    assert history.run_started is not None
