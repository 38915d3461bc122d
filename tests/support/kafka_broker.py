"""Kafka brokers of tests; see infra/kafka.

The fixture `kafka_broker` shares one broker per session. Tests that kill brokers use `with
KafkaBroker(tmp_path) as broker`, or `KafkaCluster`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from infra.kafka import broker
from infra.kafka.broker import (
    NODES,
    POLL_S,
    BrokerError,
    KafkaBroker,
    Listener,
    archive_classes,
    free_ports,
    missing_tools,
    tidied_client,
    tool,
)
from tests.support.tidy import ROOT

__all__ = [
    "ROOT",
    "BrokerError",
    "KafkaBroker",
    "KafkaCluster",
    "Listener",
    "archive_classes",
    "free_ports",
    "missing_tools",
    "tool",
    "values_of",
]

WAIT_S = 30.0
Found = TypeVar("Found")


class KafkaCluster(broker.KafkaCluster):
    def leader(self, topic: str, partition: int = 0) -> KafkaBroker:
        def look() -> KafkaBroker | None:
            number = self.partition(topic, partition)["leader_id"]
            return next((node for node in self.nodes if node.node == number and node.running), None)

        return _until(look, f"{topic} has no leader")

    def in_sync(self, topic: str, partition: int = 0) -> list[int]:
        return sorted(self.partition(topic, partition)["isr_nodes"])

    def await_in_sync(self, topic: str, partition: int = 0, count: int = NODES) -> None:
        words = f"{topic} has no {count} replicas in sync"
        _until(lambda: len(self.in_sync(topic, partition)) >= count or None, words)

    @contextmanager
    def admin(self) -> Iterator[Any]:
        alive = [node.bootstrap for node in self.nodes if node.running]
        with tidied_client():
            admin = KafkaAdminClient(bootstrap_servers=alive, request_timeout_ms=5_000)
            try:
                yield admin
            finally:
                admin.close()

    def partition(self, topic: str, partition: int) -> Any:
        with self.admin() as admin:
            partitions = admin.describe_topics([topic])[0]["partitions"]
        return next(entry for entry in partitions if entry["partition_index"] == partition)


def _until(look: Callable[[], Found | None], words: str) -> Found:
    limit = time.monotonic() + WAIT_S
    while time.monotonic() < limit:
        with suppress(KafkaError):
            if (result := look()) is not None:
                return result
        time.sleep(POLL_S)
    raise BrokerError(f"{words} after {WAIT_S:.0f} s")


def values_of(bootstrap: str, topic: str, count: int) -> list[bytes]:
    reader = KafkaConsumer(bootstrap_servers=bootstrap.split(","), enable_auto_commit=False)
    with closing(reader):
        reader.assign([TopicPartition(topic, 0)])
        reader.seek_to_beginning()
        results: list[bytes] = []
        until_s = time.monotonic() + WAIT_S
        while len(results) < count and time.monotonic() < until_s:
            for records in reader.poll(timeout_ms=200).values():
                results += [record.value for record in records]
        return results
