"""Tests of records of other Kafka clients: tombstones, headers, compression, open transactions."""

from __future__ import annotations

import gc
import logging
import time
import uuid
from collections.abc import Iterator

import pytest
from kafka import KafkaProducer

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from tests.support.kafka_broker import KafkaBroker

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

WAIT_S = 30.0
OPEN_S = 3.0
"""How long somebody else's transaction may stay open."""


class BytesName(str):
    def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
        return b"\xff\xfe name"


@pytest.fixture
def partition() -> TopicPartition:
    return TopicPartition(f"odd-{uuid.uuid4().hex}", 0)


@pytest.fixture
def bus(kafka_broker: KafkaBroker, partition: TopicPartition) -> Iterator[KafkaBus]:
    logging.getLogger("kafka").setLevel(logging.CRITICAL)
    bus = KafkaBus([kafka_broker.bootstrap])
    bus.create([TopicSpec(name=partition.topic)])
    yield bus
    bus.close()
    gc.collect()


def read_to_end(bus: KafkaBus, partition: TopicPartition) -> list[Record]:
    records: list[Record] = []
    reader = bus.reader({partition: 0})
    until_s = time.monotonic() + WAIT_S
    while not records or records[-1].value != b"ours":
        records += reader.poll(timeout_s=0.2)
        assert time.monotonic() < until_s, records
    return records


def ours(bus: KafkaBus, partition: TopicPartition) -> None:
    bus.writer().append([Append(topic=partition.topic, value=b"ours")])


def test_tombstones_odd_headers_and_compressed_batches_are_passed(
    kafka_broker: KafkaBroker, bus: KafkaBus, partition: TopicPartition
) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka_broker.bootstrap, compression_type="gzip")
    producer.send(partition.topic, value=None, key=b"gone").get(WAIT_S)
    producer.send(partition.topic, value=b"", key=None, headers=[("", b""), ("é", b"\xff")]).get(
        WAIT_S
    )
    producer.send(partition.topic, value=bytes(300_000), headers=[("h", b"")] * 40).get(WAIT_S)
    producer.close()
    ours(bus, partition)
    tombstone, headers, large, last = read_to_end(bus, partition)
    assert (tombstone.key, tombstone.value) == (b"gone", b"")
    assert (headers.key, headers.value) == (b"", b"")
    assert headers.headers == (("", b""), ("é", b"\xff"))
    assert (len(large.value), set(large.headers)) == (300_000, {("h", b"")})
    assert last.value == b"ours"


def test_a_header_name_that_is_no_text_is_one_line_that_names_it(
    kafka_broker: KafkaBroker, bus: KafkaBus, partition: TopicPartition
) -> None:
    producer = KafkaProducer(bootstrap_servers=kafka_broker.bootstrap)
    producer.send(partition.topic, value=b"theirs", headers=[(BytesName("name"), b"v")]).get(WAIT_S)
    producer.close()
    reader = bus.reader({partition: 0})
    with pytest.raises(BusError, match=f"{partition.topic}/0@0.*UnicodeDecodeError") as refused:
        reader.poll(timeout_s=WAIT_S)
    assert "\n" not in refused.value.message


def test_an_open_transaction_of_somebody_else_holds_readers_back_only_until_it_times_out(
    kafka_broker: KafkaBroker, bus: KafkaBus, partition: TopicPartition
) -> None:
    producer = KafkaProducer(
        bootstrap_servers=kafka_broker.bootstrap,
        transactional_id=f"other-{uuid.uuid4().hex}",
        transaction_timeout_ms=round(OPEN_S * 1000),
    )
    producer.init_transactions()
    producer.begin_transaction()
    producer.send(partition.topic, value=b"never committed").get(WAIT_S)
    ours(bus, partition)
    reader = bus.reader({partition: 0})
    assert reader.poll(timeout_s=0.5) == [], "it is not known yet what comes before ours"
    assert [record.value for record in read_to_end(bus, partition)] == [b"ours"]
    producer._sender.force_close()
    producer.close(timeout=1)
