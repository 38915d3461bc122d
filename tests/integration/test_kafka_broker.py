"""Tests of the test broker: it starts, keeps acknowledged records and restarts."""

from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

from tests.support.kafka_broker import KafkaBroker, values_of

pytestmark = [pytest.mark.kafka, pytest.mark.slow]


def test_broker_keeps_what_it_acknowledged_when_it_is_killed_and_started_again(
    tmp_path: Path,
) -> None:
    with KafkaBroker(tmp_path) as broker:
        address = broker.bootstrap
        admin = KafkaAdminClient(bootstrap_servers=address)
        admin.create_topics([NewTopic("kept", 1, 1)])
        admin.close()
        producer = KafkaProducer(bootstrap_servers=address, acks="all")
        producer.send("kept", b"one").get(timeout=20)
        producer.close()
        broker.kill()
        broker.start()
        assert broker.bootstrap == address
        assert values_of(address, "kept", 1) == [b"one"]
        broker.stop()
        assert not broker.log().count("ERROR"), broker.log()
