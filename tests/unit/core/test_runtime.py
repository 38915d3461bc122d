"""Tests of the loop in virtual time with a faulty bus."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import AppendFault, FaultPlan, MemoryBus, MemoryLog
from dora_pipe.core.errors import BusFull, Fenced, LogTruncated, OutcomeUnknown
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S, RETRY_PAUSE_S
from dora_pipe.core.loop.runtime import HELD_MAX, KEPT_EVERY_NS, Meter, Runtime
from dora_pipe.core.pure.machine import (
    BUS_TURN_NS,
    CaughtUp,
    HeldBack,
    Now,
    Outputs,
    Publish,
    Published,
    StopAsked,
)
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.bus_steps import ScriptedFaults
from tests.support.worker import VirtualClock

IN = TopicPartition("run.in", 0)
OUT = TopicPartition("run.out", 0)


@dataclass(frozen=True)
class Shout:
    text: str


@dataclass(frozen=True)
class Heard:
    text: str


@dataclass
class Room:
    said: list[str] = field(default_factory=list)
    closed: bool = False

    def start(self, effect: Shout) -> None:
        self.said.append(effect.text)

    def poll(self) -> list[Heard]:
        answers, self.said = [Heard(text) for text in self.said], []
        return answers

    @property
    def busy(self) -> bool:
        return bool(self.said)

    def close(self) -> None:
        self.closed = True


@dataclass
class Recorder:
    plan: list[Outputs[Shout]] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    reactions: int = 0
    due_ns: int = 2**62
    finished: bool = False

    def positions(self) -> Mapping[TopicPartition, int]:
        return {IN: 0}

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs[Shout]:
        self.reactions += 1
        self.inputs.extend(inputs)
        if StopAsked() in inputs:
            self.finished = True
        return self.plan.pop(0) if self.plan else Outputs()

    def wake_at(self) -> int:
        return self.due_ns


def world(
    machine: Recorder,
    *,
    faults: FaultPlan | None = None,
    exclusive: bool = False,
    turn_ns: int = 0,
    status_faults: FaultPlan | None = None,
) -> tuple[Runtime[Shout, Heard], MemoryBus, VirtualClock, Room]:
    log = MemoryLog()
    outside = MemoryBus(log)
    outside.create([TopicSpec(name=IN.topic), TopicSpec(name=OUT.topic)])
    bus = MemoryBus(log, faults=faults or ScriptedFaults())
    clock, room = VirtualClock(), Room()
    runtime = Runtime(
        machine,
        bus=bus,
        writer=bus.writer(exclusive="one" if exclusive else None),
        port=room,
        clock=clock,
        meter=Meter(),
        exclusive=exclusive,
        status=None if status_faults is None else MemoryBus(log, faults=status_faults).writer(),
        turn_ns=turn_ns,
    )
    return runtime, outside, clock, room


def publish(text: str, tag: str = "", *, lossy: bool = False) -> Outputs[Shout]:
    record = Append(topic=OUT.topic, value=text.encode())
    return Outputs(publish=[Publish(record=record, tag=tag, lossy=lossy)])


def written(bus: MemoryBus) -> list[bytes]:
    return [record.value for record in bus.reader({OUT: 0}).poll(timeout_s=0)]


@pytest.mark.parametrize(("topic", "ends"), [("out", True), ("metrics", False)])
def test_a_role_ends_when_records_that_it_must_keep_are_deleted(topic: str, ends: bool) -> None:
    log, clock = MemoryLog(), VirtualClock()
    bus = MemoryBus(log)
    kept = [TopicPartition(f"r.{name}", 0) for name in ("in", topic)]
    bus.create([TopicSpec(name=tp.topic) for tp in kept] + [TopicSpec(name=IN.topic)])
    bus.writer().append([Append(topic=kept[1].topic, value=b"a")])
    runtime = Runtime(
        Recorder(),
        bus=bus,
        writer=bus.writer(),
        clock=clock,
        meter=Meter(),
        exclusive=False,
        turn_ns=0,
        kept=kept,
    )

    def turns() -> None:
        for _ in range(1 + len(kept)):
            runtime.tick()
            clock.ns += KEPT_EVERY_NS

    turns()
    log.delete_before(kept[1], 1)
    if not ends:
        return turns()
    with pytest.raises(LogTruncated, match=r"r\.out/0 begins at 1: the records from") as end:
        turns()
    assert "retention.ms and retention.bytes" in (end.value.hint or "")


def test_caught_up_comes_once_and_after_everything_that_was_there_at_the_start() -> None:
    log = MemoryLog()
    bus = MemoryBus(log)
    bus.create([TopicSpec(name=IN.topic), TopicSpec(name=OUT.topic)])
    writer = bus.writer()
    for text in (b"a", b"b"):
        writer.append([Append(topic=IN.topic, value=text)])
    machine = Recorder()
    runtime = Runtime(
        machine,
        bus=bus,
        writer=bus.writer(),
        clock=VirtualClock(),
        meter=Meter(),
        exclusive=False,
        turn_ns=0,
    )
    runtime.tick()
    writer.append([Append(topic=IN.topic, value=b"later")])
    for _ in range(3):
        runtime.tick()
    observed = [entry.value if isinstance(entry, Record) else entry for entry in machine.inputs]
    assert observed == [b"a", b"b", CaughtUp(), b"later"]


def test_a_tagged_record_is_acknowledged_with_the_place_where_it_lies() -> None:
    machine = Recorder(plan=[publish("plain"), publish("tagged", tag="t1")], due_ns=0)
    runtime, outside, _, _ = world(machine)
    for _ in range(4):
        runtime.tick()
    acknowledged = [entry for entry in machine.inputs if isinstance(entry, Published)]
    places = outside.reader({OUT: 0}).poll(timeout_s=0)
    assert acknowledged == [
        Published(tag="t1", topic=OUT.topic, partition=0, offset=places[1].offset)
    ]


def test_between_two_turns_of_the_bus_nothing_is_read_and_what_is_published_is_gathered() -> None:
    machine = Recorder(plan=[publish("a"), publish("b"), publish("c")], due_ns=0)
    runtime, outside, clock, _ = world(machine, turn_ns=BUS_TURN_NS)
    runtime.tick()
    assert written(outside) == [b"a"]
    outside.writer().append([Append(topic=IN.topic, value=b"new")])
    for _ in range(2):
        clock.ns += BUS_TURN_NS // 4
        runtime.tick()
    assert written(outside) == [b"a"]
    assert not any(isinstance(entry, Record) for entry in machine.inputs)
    clock.ns += BUS_TURN_NS // 2
    runtime.tick()
    assert written(outside) == [b"a", b"b", b"c"]
    assert any(isinstance(entry, Record) for entry in machine.inputs)


def test_a_plain_writer_appends_again_after_an_unknown_outcome() -> None:
    faults = ScriptedFaults(appends={0: AppendFault(kind="unknown", lands=1)})
    runtime, outside, _, _ = world(Recorder(plan=[publish("twice")]), faults=faults)
    runtime.tick()
    assert written(outside) == [b"twice", b"twice"]


def test_an_exclusive_writer_ends_after_an_unknown_outcome() -> None:
    faults = ScriptedFaults(appends={0: AppendFault(kind="unknown", lands=0)})
    runtime, outside, _, _ = world(Recorder(plan=[publish("x")]), faults=faults, exclusive=True)
    with pytest.raises(OutcomeUnknown):
        runtime.tick()
    assert written(outside) == []


def test_a_full_bus_is_tried_again_and_given_up_after_the_delivery_timeout() -> None:
    full = AppendFault(kind="full")
    runtime, outside, clock, _ = world(
        Recorder(plan=[publish("x")]), faults=ScriptedFaults(appends={0: full, 1: full})
    )
    runtime.tick()
    assert written(outside) == [b"x"]

    always = ScriptedFaults(appends=dict.fromkeys(range(10_000), full))
    runtime, outside, clock, _ = world(Recorder(plan=[publish("x")]), faults=always)
    with pytest.raises(BusFull):
        runtime.tick()
    assert DELIVERY_TIMEOUT_S * 1e9 <= clock.ns < 2 * DELIVERY_TIMEOUT_S * 1e9
    assert written(outside) == []


def test_a_bus_that_is_away_for_a_while_is_waited_for_when_reading_and_when_appending() -> None:
    faults = ScriptedFaults(appends={0: AppendFault(kind="failed")}, polls={0, 1})
    machine = Recorder(plan=[publish("patient")])
    runtime, outside, clock, _ = world(machine, faults=faults)
    runtime.tick()
    assert machine.inputs == [CaughtUp()]
    assert written(outside) == [b"patient"]
    assert clock.ns == 3 * int(RETRY_PAUSE_S * 1e9)


def test_a_status_that_cannot_be_appended_neither_ends_an_exclusive_role_nor_holds_it_up() -> None:
    full, unknown = AppendFault(kind="full"), AppendFault(kind="unknown", lands=0)
    plan = [publish("s0", lossy=True), publish("s1", lossy=True), publish("s2", lossy=True)]
    for outputs in plan:
        outputs.publish += publish("fact").publish
    runtime, outside, clock, _ = world(
        Recorder(plan=plan, due_ns=0),
        exclusive=True,
        status_faults=ScriptedFaults(appends={0: full, 1: unknown}),
    )
    for _ in range(3):
        runtime.tick()
    assert written(outside) == [b"fact", b"fact", b"fact", b"s2"]
    assert clock.ns == 0, "nobody waits for it"


def test_a_status_waits_for_no_fact_that_cannot_be_appended() -> None:
    outputs = publish("status", lossy=True)
    outputs.publish += publish("fact").publish
    faults = ScriptedFaults(appends={0: AppendFault(kind="unknown", lands=0)})
    runtime, outside, _, _ = world(
        Recorder(plan=[outputs]), faults=faults, exclusive=True, status_faults=ScriptedFaults()
    )
    with pytest.raises(OutcomeUnknown):
        runtime.tick()
    assert written(outside) == []


def held(log: MemoryLog, clock: VirtualClock, text: str) -> None:
    late = ScriptedFaults(appends={0: AppendFault(kind="delayed", delay_ms=1000)})
    bus = MemoryBus(log, faults=late, now_ms=lambda: clock.ns // 1_000_000)
    bus.writer().append([Append(topic=IN.topic, value=text.encode())])


def test_a_machine_is_told_while_records_are_held_back_and_catches_up_only_behind_them() -> None:
    log, clock, machine = MemoryLog(), VirtualClock(), Recorder()
    bus = MemoryBus(log, now_ms=lambda: clock.ns // 1_000_000)
    bus.create([TopicSpec(name=IN.topic), TopicSpec(name=OUT.topic)])
    held(log, clock, "open")
    runtime = Runtime(
        machine,
        bus=bus,
        writer=bus.writer(),
        clock=clock,
        meter=Meter(),
        exclusive=False,
        turn_ns=0,
    )
    for _ in range(3):
        runtime.tick()
    assert machine.inputs == [HeldBack((IN,))]
    clock.sleep(1.0)
    for _ in range(2):
        runtime.tick()
    observed = [entry.value if isinstance(entry, Record) else entry for entry in machine.inputs]
    assert observed == [HeldBack((IN,)), b"open", HeldBack(()), CaughtUp()]


def test_a_stop_is_told_once_and_the_machine_ends_the_loop() -> None:
    machine = Recorder()
    runtime, _, _, room = world(machine)
    runtime.run(stop=lambda: True)
    assert machine.inputs.count(StopAsked()) == 1
    runtime.close()
    assert room.closed


LIMIT_S = 60.0


@dataclass
class SlowWriter:
    error: Exception | None = None
    begun: threading.Event = field(default_factory=threading.Event)
    go: threading.Event = field(default_factory=threading.Event)
    appended: list[bytes] = field(default_factory=list)

    def append(self, records: Sequence[Append]) -> list[int]:
        self.begun.set()
        assert self.go.wait(LIMIT_S)
        if self.error is not None:
            raise self.error
        self.appended += [record.value for record in records]
        return list(range(len(records)))

    def close(self) -> None:
        """Release nothing."""


@dataclass
class Flooding(Recorder):
    flooded: threading.Event = field(default_factory=threading.Event)

    def react(self, inputs: Sequence[Any], now: Now) -> Outputs[Shout]:
        if StopAsked() in inputs:
            self.flooded.set()
            return Outputs(publish=publish("more").publish * HELD_MAX)
        return publish("first") if CaughtUp() in inputs else Outputs()


def in_background(machine: Recorder, writer: SlowWriter) -> Runtime[Shout, Heard]:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=IN.topic), TopicSpec(name=OUT.topic)])
    return Runtime(
        machine,
        bus=bus,
        writer=writer,
        clock=VirtualClock(),
        meter=Meter(),
        exclusive=False,
        background=True,
    )


def test_the_loop_waits_for_the_append_when_too_many_records_are_held() -> None:
    machine, writer, appended = Flooding(), SlowWriter(), list[int]()
    runtime = in_background(machine, writer)

    def release() -> None:
        machine.flooded.wait(LIMIT_S)
        writer.go.set()

    def stop() -> bool:
        if machine.flooded.is_set():
            appended.append(len(writer.appended))
            machine.finished = True
        return writer.begun.is_set()

    threading.Thread(target=release, daemon=True).start()
    runtime.run(stop)
    runtime.close()
    assert appended == [1]
    assert writer.appended == [b"first"] + [b"more"] * HELD_MAX


def test_an_error_of_an_append_in_the_background_ends_the_role() -> None:
    writer = SlowWriter(error=Fenced("a newer writer"))
    writer.go.set()
    runtime = in_background(Flooding(), writer)
    with pytest.raises(Fenced, match="a newer writer"):
        runtime.run(stop=lambda: False)
    runtime.close()
