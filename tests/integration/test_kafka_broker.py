"""The broker that the tests stand on starts, forgets nothing it acknowledged, and comes back."""

from pathlib import Path

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import NewTopic

from infra.kafka.broker import new_cluster
from tests.support.kafka_broker import KafkaBroker, free_ports

pytestmark = pytest.mark.kafka


def _values(bootstrap: str, topic: str, count: int) -> list[bytes]:
    reader = KafkaConsumer(bootstrap_servers=bootstrap, enable_auto_commit=False)
    try:
        reader.assign([TopicPartition(topic, 0)])
        reader.seek_to_beginning()
        found: list[bytes] = []
        for _ in range(100):
            for records in reader.poll(timeout_ms=200).values():
                found += [record.value for record in records]
            if len(found) >= count:
                break
        return found
    finally:
        reader.close()


def test_free_ports_are_different_from_each_other() -> None:
    assert len(set(free_ports(5))) == 5


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
        assert _values(address, "kept", 1) == [b"one"]
        broker.stop()
        assert not broker.log().count("ERROR"), broker.log()


def test_a_cluster_id_never_looks_like_an_option() -> None:
    ids = {new_cluster() for _ in range(1000)}
    assert len(ids) == 1000
    assert {len(one) for one in ids} == {22}
    assert not [one for one in ids if one.startswith("-")]
