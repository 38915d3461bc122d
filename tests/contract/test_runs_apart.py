"""Runs whose names begin alike share a log and do not see each other, on every bus."""

from __future__ import annotations

from uuid import uuid4

import pytest

from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.core.errors import Fenced
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.schemas.topics import Topics
from tests.support.bus_steps import Harness, catch_up, values


def runs() -> list[Topics]:
    stem = f"a{uuid4().hex[:8]}"
    return [Topics(f"{stem}{end}") for end in ("", "-control", "_control", "B", "b")]


def create_runs(bus: Bus) -> list[Topics]:
    actual_runs = runs()
    bus.create([TopicSpec(name=name) for run in actual_runs for name in run.all()])
    return actual_runs


def test_records_of_a_run_are_in_its_topics_alone(harness: Harness) -> None:
    bus = harness.open()
    result = create_runs(bus)
    there = set(bus.topics())
    names = {run: [name for name in there if name.rpartition(".")[0] == run.run] for run in result}
    assert all(set(mine) == set(run.all()) for run, mine in names.items())
    writer = bus.writer()
    for mine in names.values():
        for name in mine:
            writer.append([Append(topic=name, value=name.encode())])
    everywhere = [TopicPartition(name, 0) for mine in names.values() for name in mine]
    reader = bus.reader(dict.fromkeys(everywhere, 0))
    read = [record for position in everywhere for record in catch_up(bus, reader, position)]
    assert len(read) == len(everywhere) == 30
    assert {record.topic: record.value for record in read} == {
        entry.topic: entry.topic.encode() for entry in everywhere
    }


def test_exclusive_writer_of_a_run_fences_nobody_else_s(harness: Harness) -> None:
    bus, other = harness.open(), harness.open()
    result = create_runs(bus)
    roles = ("orchestrator", "trainer")
    writers = {
        (run, role): bus.writer(exclusive=f"{run.run}.{role}") for run in result for role in roles
    }
    first = result[0]
    heir = other.writer(exclusive=f"{first.run}.orchestrator")
    heir.append([Append(topic=first.decisions, value=b"heir")])
    for (run, role), writer in writers.items():
        record = Append(topic=run.decisions, value=role.encode())
        if (run, role) == (first, "orchestrator"):
            with pytest.raises(Fenced):
                writer.append([record])
        else:
            writer.append([record])
    for run in result:
        partition = TopicPartition(run.decisions, 0)
        mine = [b"heir", b"trainer"] if run is first else [b"orchestrator", b"trainer"]
        assert values(catch_up(bus, bus.reader({partition: 0}), partition)) == mine
