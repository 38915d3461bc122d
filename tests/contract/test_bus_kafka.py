"""What only a broker can do, beyond the contract."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from dora_pipe.bus import kafka, kafka_bounds
from dora_pipe.bus.kafka_client import send
from dora_pipe.bus.port import Append, TopicPartition
from dora_pipe.errors import Fenced
from tests.support.bus_harness import KafkaHarness
from tests.support.bus_steps import appends, catch_up, topic_on
from tests.support.kafka_broker import KafkaBroker

pytestmark = pytest.mark.kafka


@pytest.fixture
def harness(kafka_broker: KafkaBroker) -> Iterator[KafkaHarness]:
    made = KafkaHarness(kafka_broker.bootstrap)
    yield made
    made.close()


def test_a_writer_fenced_between_two_records_of_one_append_is_told_so(
    harness: KafkaHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("w")
    old = bus.writer(exclusive=name)
    bus.writer(exclusive=name)

    def send_slowly(producer: Any, record: Append) -> Any:
        sent = send(producer, record)
        time.sleep(0.3)  # by then the broker has refused the first one
        return sent

    monkeypatch.setattr(kafka_bounds, "send", send_slowly)
    with pytest.raises(Fenced):
        old.append(appends(topic, "a", "b", "c"))


def test_plain_writers_leave_no_gaps_here_so_gaps_may_not_be_relied_on(
    harness: KafkaHarness,
) -> None:
    bus = harness.open()
    topic = topic_on(harness, bus)
    writer = bus.writer()
    assert [writer.append(appends(topic, "a"))[0] for _ in range(3)] == [0, 1, 2]


def test_what_a_dead_writer_left_open_hides_nothing_once_its_successor_is_there(
    harness: KafkaHarness,
) -> None:
    bus = harness.open()
    topic, name = topic_on(harness, bus), harness.topic("w")
    at = TopicPartition(topic, 0)
    dead = bus.writer(exclusive=name)
    assert isinstance(dead, kafka.KafkaWriter) and dead._producer is not None
    dead._producer.begin_transaction()
    send(dead._producer, appends(topic, "open")[0]).get(10)
    bus.writer().append(appends(topic, "behind"))
    assert bus.end(at) == 0, "readers stop before the open transaction"
    bus.writer(exclusive=name)
    reader = bus.reader({at: 0})
    assert [record.value for record in catch_up(bus, reader, at)] == [b"behind"]
