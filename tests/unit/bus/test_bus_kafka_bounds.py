"""Tests of bounds, order and timing of Kafka requests in flight."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka import errors as kafka_errors
from kafka.future import Future

from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.kafka import in_flight as in_flight_module
from dora_pipe.bus.kafka.in_flight import InFlight
from dora_pipe.bus.kafka.records import Fetched
from dora_pipe.core.pure.records import Append, Record, TopicPartition


@dataclass
class Landed:
    offset: int


@dataclass
class Producer:
    fails_at: int = -1
    sent: list[bytes] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    flushes: list[float] = field(default_factory=list)

    def flush(self, timeout: float) -> None:
        self.flushes.append(timeout)

    def send(self, topic: str, value: bytes, **_: Any) -> Any:
        self.sent.append(value)
        return Later(self, len(self.sent) - 1)


class Later(Future):  # type: ignore[misc]  # the client has no types
    def __init__(self, producer: Producer, number: int) -> None:
        super().__init__()
        self.producer, self.number = producer, number

    def get(self, timeout: float) -> Landed:
        self.producer.waits.append(timeout)
        if self.number == self.producer.fails_at:
            raise kafka_errors.KafkaTimeoutError("no answer")
        self.success(Landed(100 + self.number))
        assert isinstance(self.value, Landed)
        return self.value


def record(size: int = 1) -> Append:
    return Append(topic="t", value=b"x" * size)


@given(sizes=st.lists(st.integers(0, 40), max_size=60), most=st.integers(1, 8))
def test_never_more_records_and_bytes_are_under_way_than_the_bounds_allow(
    sizes: list[int], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(in_flight_module, "IN_FLIGHT_RECORDS_MAX", most)
        patch.setattr(in_flight_module, "IN_FLIGHT_BYTES_MAX", 50)
        in_flight = InFlight(Producer(), limit_s=5)
        for size in sizes:
            in_flight.send(record(size))
            assert 1 <= len(in_flight) <= most
            assert in_flight.bytes <= 50
        assert in_flight.wait() == [100 + number for number in range(len(sizes))]


def test_no_wait_is_longer_than_what_is_left_of_the_oldest_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = iter([10.0, 11.0, 12.0, 14.0, 99.0])  # sent at 10, 11; flushed at 12; waited for
    monkeypatch.setattr("dora_pipe.bus.kafka.in_flight.time.monotonic", lambda: next(now_s))
    producer = Producer()
    in_flight = InFlight(producer, limit_s=5)
    in_flight.send(record())
    in_flight.send(record())
    in_flight.wait()
    assert producer.flushes == [3.0]
    assert producer.waits == [1.0, 0.0]


@pytest.mark.parametrize(
    "cause",
    [
        kafka_errors.InvalidTimestampError("late"),
        kafka_errors.MessageSizeTooLargeError("large"),
        kafka_errors.InvalidRecordError("no key"),
    ],
)
@pytest.mark.parametrize("failed", [True, False])
def test_a_refusal_is_found_behind_the_follow_up_error_that_is_seen_first(
    cause: Exception, failed: bool
) -> None:
    in_flight = InFlight(Producer(), limit_s=5)
    records = [record(size) for size in (1, 2, 3)]
    for each in records:
        in_flight.send(each)
    if failed:
        futures = [sent[0] for sent in in_flight._sent]
        futures[0].failure(kafka_errors.KafkaError("part of a batch with invalid records"))
        futures[1].failure(cause)
    follow_up = kafka_errors.KafkaError("Cannot perform send", cause)
    assert in_flight.failure(follow_up) == (cause, records[1] if failed else None)


def test_a_failure_without_a_refusal_is_the_cause_of_its_own_error() -> None:
    in_flight = InFlight(Producer(fails_at=0), limit_s=5)
    in_flight.send(record())
    fenced = kafka_errors.ProducerFencedError("newer")
    follow_up = kafka_errors.KafkaError("Cannot perform send", fenced)
    assert in_flight.failure(follow_up) == (fenced, None)


def fetched(count: int, *, partition: int = 0, size: int = 10) -> list[Record]:
    value = b"x" * size
    return [
        Record(topic="t", partition=partition, offset=offset, key=b"", value=value)
        for offset in range(count)
    ]


@given(count=st.integers(0, 30), records_max=st.integers(1, 7), bytes_max=st.integers(1, 60))
def test_what_comes_over_the_bounds_comes_later_once_and_in_order(
    count: int, records_max: int, bytes_max: int
) -> None:
    kept = Fetched()
    came = fetched(count)
    records: list[Record] = kept.take(came, records_max=records_max, bytes_max=bytes_max)
    while kept:
        assert kept.first(TopicPartition("t", 0)) == records[-1].offset + 1
        result = kept.take([], records_max=records_max, bytes_max=bytes_max)
        assert 1 <= len(result) <= records_max
        assert len(result) == 1 or sum(map(record_bytes, result)) <= bytes_max
        records += result
    assert records == came
    assert kept.first(TopicPartition("t", 0)) is None


def test_forgetting_one_partition_keeps_the_others() -> None:
    kept = Fetched()
    zero, partition = TopicPartition("t", 0), TopicPartition("t", 1)
    kept.take([*fetched(2), *fetched(2, partition=1)], records_max=1, bytes_max=1000)
    assert (kept.first(zero), kept.first(partition)) == (1, 0)
    kept.forget(zero)
    assert (kept.first(zero), kept.first(partition)) == (None, 0)
    assert [each.at for each in kept.take([], records_max=9, bytes_max=1000)] == [
        partition,
        partition,
    ]
