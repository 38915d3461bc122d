"""A log one of whose topics lies in another log: read under its own name, never written there."""

from __future__ import annotations

import pytest

from dora_pipe.bus.lent_topic import LentTopicBus
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, TopicPartition, TopicSpec
from dora_pipe.core.errors import BusError

OWN, LENT, THEIRS = "again.control", "again.trajectories", "demo.trajectories"
CONTROL, TRAJECTORIES = TopicPartition(OWN, 0), TopicPartition(LENT, 1)


@pytest.fixture
def lender() -> MemoryBus:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=THEIRS, partitions=2), TopicSpec(name="demo.control")])
    bus.writer().append(
        [Append(topic=THEIRS, partition=1, value=one) for one in (b"a", b"b", b"c")]
    )
    bus.writer().append([Append(topic="demo.control", value=b"fact")])
    return bus


@pytest.fixture
def bus(lender: MemoryBus) -> LentTopicBus:
    own = MemoryBus(MemoryLog())
    own.create([TopicSpec(name=OWN), TopicSpec(name=LENT, partitions=5)])
    return LentTopicBus(own, lender, lent={LENT: THEIRS}, others=("demo.control",))


def test_the_lent_topic_has_the_places_of_the_other_log(
    bus: LentTopicBus, lender: MemoryBus
) -> None:
    there = TopicPartition(THEIRS, 1)
    assert bus.partitions(LENT) == 2
    assert bus.end(TRAJECTORIES) == lender.end(there) == bus.written_end(TRAJECTORIES)
    assert bus.begin(TRAJECTORIES) == 0
    reader = bus.reader({TRAJECTORIES: 1})
    found = reader.poll(timeout_s=0.0)
    assert [(one.topic, one.partition, one.offset, one.value) for one in found] == [
        (LENT, 1, 1, b"b"),
        (LENT, 1, 2, b"c"),
    ]
    reader.seek(TRAJECTORIES, 0)
    assert reader.poll(timeout_s=0.0, records_max=1)[0].value == b"a"
    assert reader.position(TRAJECTORIES) == 1
    assert reader.held_back() == []


def test_its_own_topics_and_lent_ones_are_read_side_by_side(bus: LentTopicBus) -> None:
    bus.writer().append([Append(topic=OWN, value=b"own")])
    reader = bus.reader({CONTROL: 0, TRAJECTORIES: 0, TopicPartition("demo.control", 0): 0})
    found = [one for _ in range(4) for one in reader.poll(timeout_s=0.0)]
    assert {(one.topic, one.value) for one in found} == {
        (OWN, b"own"),
        (LENT, b"a"),
        (LENT, b"b"),
        (LENT, b"c"),
        ("demo.control", b"fact"),
    }
    assert reader.position(CONTROL) >= 1


def test_what_is_written_goes_into_its_own_log(bus: LentTopicBus, lender: MemoryBus) -> None:
    before = lender.end(TopicPartition(THEIRS, 1))
    bus.writer().append([Append(topic=LENT, partition=1, value=b"own")])
    assert lender.end(TopicPartition(THEIRS, 1)) == before
    assert "demo.control" not in bus.topics()


def test_nothing_lent_is_deleted_from_here(bus: LentTopicBus) -> None:
    with pytest.raises(BusError, match="is lent"):
        bus.trim(TRAJECTORIES, 1)


def test_a_partition_that_is_not_read_is_refused(bus: LentTopicBus) -> None:
    reader = bus.reader({TRAJECTORIES: 0})
    with pytest.raises(BusError, match="does not read"):
        reader.position(CONTROL)
