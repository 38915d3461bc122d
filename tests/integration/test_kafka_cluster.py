"""Tests of three real brokers: replication, the loss of one and its return."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from kafka import KafkaProducer
from kafka.admin import NewTopic

from tests.support.kafka_broker import KafkaBroker, KafkaCluster, advertise, values_of

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    # The client leaves the sockets of refused connections to the collector.
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

TOPIC = "kept"
WAIT_S = 30


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path) as cluster:
        with cluster.admin() as admin:
            admin.create_topics([NewTopic(TOPIC, 1, -1)], wait_for_metadata=True)
        cluster.await_in_sync(TOPIC)
        yield cluster
    gc.collect()


def append(bootstrap: str, *values: bytes) -> None:
    producer = KafkaProducer(bootstrap_servers=bootstrap.split(","), acks="all")
    try:
        for value in values:
            producer.send(TOPIC, value).get(timeout=WAIT_S)
    finally:
        producer.close()


def test_a_cluster_goes_on_when_its_leader_is_killed_and_takes_it_back(
    cluster: KafkaCluster,
) -> None:
    assert cluster.in_sync(TOPIC) == [1, 2, 3]
    append(cluster.bootstrap, b"one")
    first = cluster.leader(TOPIC)
    first.kill()
    assert not first.running
    second = cluster.leader(TOPIC)
    assert second is not first
    append(cluster.bootstrap, b"two")
    first.start()
    cluster.await_in_sync(TOPIC)
    append(cluster.bootstrap, b"three")
    assert values_of(cluster.bootstrap, TOPIC, 3) == [b"one", b"two", b"three"]


def test_a_cluster_that_was_stopped_has_what_it_had(cluster: KafkaCluster) -> None:
    append(cluster.bootstrap, b"one")
    address = cluster.bootstrap
    cluster.kill()
    cluster.start()
    cluster.stop()
    cluster.start()
    assert cluster.bootstrap == address
    assert values_of(address, TOPIC, 1) == [b"one"]


def test_another_listener_is_another_door_to_the_same_log(tmp_path: Path) -> None:
    more = dict.fromkeys(("SECOND", "ELSEWHERE"), "PLAINTEXT")
    broker = KafkaBroker(tmp_path, listeners=more, settings={"num.partitions": "7"})
    advertise(broker, "ELSEWHERE", "127.0.0.1:1")
    with broker:
        addresses = {broker.bootstrap, broker.address("SECOND"), broker.address("ELSEWHERE")}
        assert len(addresses) == 3
        producer = KafkaProducer(bootstrap_servers=broker.address("SECOND"))
        producer.close()
        written = (tmp_path / "server.properties").read_text()
        assert "ELSEWHERE://127.0.0.1:1" in written
        assert "num.partitions=7" in written
