"""Tests that a restarted orchestrator equals the previous one."""

from __future__ import annotations

from typing import Any

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.errors import Fenced, InvariantBroken, LogTruncated, SchemaError, UsageError
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.orchestrator.process.recovery import recover
from dora_pipe.orchestrator.process.role import Instance, run_orchestrator
from dora_pipe.orchestrator.state import State
from dora_pipe.schemas.control import RoleStarted, RunStarted, decode_control
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support import orchestrator_records as records
from tests.support.orchestrator_world import Chances, World, WorldClock

INSTANCE = Instance(name="o", host="h", pid=1, package="0")


def finished_world(**chances: Any) -> World:
    world = World(
        seed=5,
        config=records.make_config(run__steps=6, evaluation__prompts=2),
        workers={"w0": (3, 1), "w1": (2, 0)},
        chances=Chances(**chances),
    )
    world.run(seconds=3000)
    assert world.machine.state.done
    return world


def test_folding_stops_where_a_round_was_changed() -> None:
    world = finished_world()
    other, topics = MemoryBus(MemoryLog()), world.topics
    other.create([TopicSpec(name=name) for name in topics.all()])
    writer = other.writer()
    for name in (topics.control, topics.decisions):
        reader = world.bus.reader({TopicPartition(name, 0): 0})
        for number, record in enumerate(reader.poll(timeout_s=0, records_max=10**6)):
            value = record.value
            if name == topics.decisions and number == 4:
                value = value.replace(b'"incarnation":0', b'"incarnation":1')
            writer.append([Append(topic=name, value=value)])
    with pytest.raises(InvariantBroken, match=r"round \d+"):
        recover(other, topics)


def test_control_that_was_cut_off_behind_a_round_is_a_truncated_log() -> None:
    world = finished_world()
    world.log.truncate(TopicPartition(world.topics.control, 0), 40)
    with pytest.raises(LogTruncated, match="ends at 40"):
        recover(world.bus, world.topics)


def test_round_that_cannot_be_read_is_named_by_its_offset() -> None:
    bus, topics = MemoryBus(MemoryLog()), Topics("tiny")
    bus.create([TopicSpec(name=name) for name in topics.all()])
    bus.writer().append([Append(topic=topics.decisions, value=b'{"ordinal":0}')])
    with pytest.raises(SchemaError, match="decisions offset 0"):
        recover(bus, topics)


class Stopwatch:
    def __init__(self, questions: int) -> None:
        self.left = questions

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def be_orchestrator(bus: MemoryBus, *, first: bool = True, turns: int = 10) -> State:
    config = records.make_config()
    return run_orchestrator(
        bus,
        Topics("tiny"),
        stop=Stopwatch(turns),
        timing=config.timing,
        clock=WorldClock(),
        instance=INSTANCE,
        run_started=records.run_started(config) if first else None,
    )


def fresh() -> MemoryBus:
    bus = MemoryBus(MemoryLog())
    topics = Topics("tiny")
    bus.create(
        [TopicSpec(name=name, partitions=1 + (name == topics.metrics)) for name in topics.all()]
    )
    return bus


def control_of(bus: MemoryBus) -> list[object]:
    reader = bus.reader({TopicPartition("tiny.control", 0): 0})
    return [decode_control(record.value) for record in reader.poll(timeout_s=0)]


def test_role_starts_the_run_once_and_takes_the_next_incarnation_each_time() -> None:
    bus = fresh()
    state = be_orchestrator(bus)
    assert state.started is not None
    assert not state.done
    again = be_orchestrator(bus)
    control = control_of(bus)
    assert [type(event) for event in control] == [RunStarted, RoleStarted, RoleStarted]
    assert [event.incarnation for event in control if isinstance(event, RoleStarted)] == [0, 1]
    assert (again.orchestrator_incarnation, again.round_incarnation) == (1, 1)


def test_role_without_a_run_says_so() -> None:
    with pytest.raises(UsageError, match="has not been started"):
        be_orchestrator(fresh(), first=False)


def test_role_of_a_finished_run_ends_at_once_and_writes_nothing() -> None:
    bus = fresh()
    be_orchestrator(bus)
    bus.writer().append([Append(topic="tiny.control", value=encode(records.command("stop")))])
    assert be_orchestrator(bus).done
    ends = {name: bus.end(TopicPartition(name, 0)) for name in Topics("tiny").all()}
    assert be_orchestrator(bus, turns=10**6).done
    assert {name: bus.end(TopicPartition(name, 0)) for name in Topics("tiny").all()} == ends


def test_orchestrator_that_was_replaced_is_fenced_at_its_next_append() -> None:
    bus = fresh()
    be_orchestrator(bus)

    def replaced() -> bool:
        if stop.left == 5:
            bus.writer(exclusive="tiny.orchestrator")
            bus.writer().append([Append(topic="tiny.control", value=encode(records.joined("w0")))])
        return stop()

    stop = Stopwatch(10)
    with pytest.raises(Fenced):
        run_orchestrator(
            bus,
            Topics("tiny"),
            stop=replaced,
            timing=records.make_config().timing,
            clock=WorldClock(),
            instance=INSTANCE,
        )
