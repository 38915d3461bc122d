"""The real brokers that tests stand on; what they are and how they are hurt is in infra/kafka.

Take the fixture `kafka_broker` (one broker per session) and use topics of your own. A test that
kills or stops brokers makes its own: `with KafkaBroker(tmp_path) as broker`, or `KafkaCluster`.
"""

import time
from contextlib import closing

from kafka import KafkaConsumer, TopicPartition

from infra.kafka.broker import (
    BrokerError,
    KafkaBroker,
    KafkaCluster,
    Listener,
    archive_classes,
    free_ports,
    missing_tools,
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


def values_of(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """What is in a topic's first partition once so much is there, read by the client itself."""
    reader = KafkaConsumer(bootstrap_servers=bootstrap.split(","), enable_auto_commit=False)
    with closing(reader):
        reader.assign([TopicPartition(topic, 0)])
        reader.seek_to_beginning()
        found: list[bytes] = []
        until_s = time.monotonic() + WAIT_S
        while len(found) < count and time.monotonic() < until_s:
            for records in reader.poll(timeout_ms=200).values():
                found += [record.value for record in records]
        return found
