"""A real broker and records of every size: nothing is missed, nothing comes twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from uuid import uuid4

import pytest

from dora_pipe.bus.bus import Reader, TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.kafka.client import ANSWER_BYTES
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
def bus(kafka_broker: KafkaBroker) -> Iterator[KafkaBus]:
    bus = KafkaBus([kafka_broker.bootstrap])
    yield bus
    bus.close()


@pytest.fixture
def partition(bus: KafkaBus) -> TopicPartition:
    topic = f"sizes-{uuid4().hex[:8]}"
    bus.create([TopicSpec(name=topic)])
    return TopicPartition(topic, 0)


def records(partition: TopicPartition, count: int, size: int = 1) -> list[Append]:
    return [
        Append(topic=partition.topic, value=bytes([each % 256]) * size) for each in range(count)
    ]


def read(bus: KafkaBus, partition: TopicPartition, count: int, timeout_s: float) -> list[Record]:
    reader = bus.reader({partition: 0})
    records: list[Record] = []
    deadline_s = time.monotonic() + 60
    while len(records) < count:
        records += reader.poll(timeout_s=timeout_s)
        assert time.monotonic() < deadline_s
    assert reader.position(partition) == bus.end(partition)
    reader.close()
    return records


def test_the_first_poll_of_a_reader_brings_what_is_there(
    bus: KafkaBus, partition: TopicPartition
) -> None:
    bus.writer().append(records(partition, 3))
    assert [record.offset for record in bus.reader({partition: 0}).poll(timeout_s=30)] == [0, 1, 2]


def test_polls_that_never_wait_take_in_answers_of_many_megabytes(
    bus: KafkaBus, partition: TopicPartition
) -> None:
    given = records(partition, 40, size=1_000_000)
    assert bus.writer().append(given) == list(range(40)), "and an append above the bounds lands"
    result = read(bus, partition, 40, timeout_s=0.0)
    assert [record.value for record in result] == [record.value for record in given]


def test_a_record_larger_than_an_answer_that_is_asked_for_comes_by_itself(bus: KafkaBus) -> None:
    topic, large = f"sizes-{uuid4().hex[:8]}", ANSWER_BYTES + 1_000_000
    bus.create([TopicSpec(name=topic, partitions=2)])
    sizes = (10, large, 20)
    for partition in range(2):
        values = (bytes(size) for size in sizes)
        given = [Append(topic=topic, partition=partition, value=value) for value in values]
        assert bus.writer().append(given) == [0, 1, 2]
    reader = bus.reader({TopicPartition(topic, index): 0 for index in range(2)})
    results: dict[int, list[int]] = {0: [], 1: []}
    deadline_s = time.monotonic() + 60
    while sum(map(len, results.values())) < 2 * len(sizes):
        for record in reader.poll(timeout_s=1):
            results[record.partition].append(len(record.value))
        assert time.monotonic() < deadline_s
    assert results == {0: list(sizes), 1: list(sizes)}


def test_a_reader_that_reads_on_misses_nothing_and_one_that_seeks_repeats(
    bus: KafkaBus, partition: TopicPartition
) -> None:
    writer, reader = bus.writer(), bus.reader({partition: 0})
    for number in range(20):
        assert writer.append(records(partition, 1)) == [number]
        assert [record.offset for record in _next(reader)] == [number]
    reader.seek(partition, 5)
    assert [record.offset for record in _next(reader)] == list(range(5, 20))


def _next(reader: Reader) -> list[Record]:
    records: list[Record] = []
    while not records:
        records = reader.poll(timeout_s=1)
    return records
