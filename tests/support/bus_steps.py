"""Harness interface and steps for checks of the bus contract."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dora_pipe.bus.bus import Bus, Reader, TopicSpec, Writer
from dora_pipe.bus.memory import AppendFault, FaultPlan
from dora_pipe.core.pure.records import Append, Record, TopicPartition

PATIENCE_S = 30.0
"""Seconds until a check fails."""


class Harness(Protocol):
    waits: bool
    """Whether polls block; the memory bus has virtual time."""
    shared: bool
    """Whether other processes can open `url`."""
    url: str

    def open(self) -> Bus:
        """Open another bus; the caller or the harness closes it."""
        ...

    def topic(self, name: str) -> str: ...

    def make_next_append_unknown(self, writer: Writer) -> None:
        """Make the next append succeed with an unknown outcome."""
        ...

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        """Kill a writer inside an append; return a function that ends the append, or None if it
        blocks no reader."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedFaults(FaultPlan):
    """Faults of given calls."""

    appends: Mapping[int, AppendFault] = field(default_factory=dict)
    polls: Collection[int] = ()

    def on_append(self, call: int, records: Sequence[Append]) -> AppendFault | None:
        return self.appends.get(call)

    def on_poll(self, call: int) -> bool:
        return call in self.polls


Check = Callable[[Harness], None]


def checks_of(module: dict[str, Any]) -> list[Check]:
    functions = [entry for entry in module.values() if inspect.isfunction(entry)]
    return [
        function
        for function in functions
        if [*inspect.signature(function).parameters] == ["harness"]
    ]


def opened(harness: Harness, *, partitions: int = 1) -> tuple[Bus, str, TopicPartition]:
    bus = harness.open()
    topic = topic_on(harness, bus, partitions=partitions)
    return bus, topic, TopicPartition(topic, 0)


def topic_on(
    harness: Harness, bus: Bus, *, partitions: int = 1, max_record_bytes: int = 1 << 24
) -> str:
    name = harness.topic("t")
    bus.create([TopicSpec(name=name, partitions=partitions, max_record_bytes=max_record_bytes)])
    return name


def read(reader: Reader, count: int) -> list[Record]:
    records: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while len(records) < count:
        records += reader.poll(timeout_s=0.5, records_max=count - len(records))
        assert time.monotonic() < deadline_s, f"{len(records)} of {count} records came"
    return records


def catch_up(bus: Bus, reader: Reader, partition: TopicPartition) -> list[Record]:
    records: list[Record] = []
    deadline_s = time.monotonic() + PATIENCE_S
    while reader.position(partition) < bus.end(partition):
        records += reader.poll(timeout_s=0.2)
        assert time.monotonic() < deadline_s, (
            f"stuck at {reader.position(partition)} of {bus.end(partition)}"
        )
    return records


def values(records: Sequence[Record]) -> list[bytes]:
    return [record.value for record in records]


def appends(topic: str, *texts: str, partition: int = 0) -> list[Append]:
    return [Append(topic=topic, value=text.encode(), partition=partition) for text in texts]


def read_poll(reader: Reader, *, records_max: int = 500, bytes_max: int = 1 << 20) -> list[Record]:
    deadline_s = time.monotonic() + PATIENCE_S
    records: list[Record] = []
    while not records and time.monotonic() < deadline_s:
        records = reader.poll(timeout_s=0.5, records_max=records_max, bytes_max=bytes_max)
    return records
