"""kafka-python by itself, as somebody would use it who needs every record acknowledged.

The floor for our layer: the same settings of the client, nothing checked, nothing turned into
anything. The producer never waits for one call: only for the oldest record when so much is
under way that it would not fit into memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Final

from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import TopicPartition as KafkaPartition

from dora_pipe.bus.kafka.bus import IN_FLIGHT_BYTES_MAX, IN_FLIGHT_RECORDS_MAX
from dora_pipe.bus.kafka.client import (
    DELIVERY_LIMIT_S,
    LINGER_MS,
    client_settings,
    consumer_settings,
    producer_settings,
)
from dora_pipe.bus.kafka.security import PLAINTEXT
from dora_pipe.bus.port import Append, TopicPartition

WAIT_S: Final = 30.0
POLL_MS: Final = 1000
POLL_RECORDS_MAX: Final = 500


class RawWriter:
    """An idempotent producer with bounded records and bytes under way."""

    def __init__(self, servers: str, *, linger_ms: int = LINGER_MS) -> None:
        self._flight: deque[tuple[Any, int]] = deque()
        self._flight_bytes = 0
        settings = producer_settings(None, DELIVERY_LIMIT_S) | {"linger_ms": linger_ms}
        self._producer = KafkaProducer(**client_settings(servers.split(","), PLAINTEXT), **settings)

    def append(self, records: Sequence[Append]) -> None:
        """Send; waits only when too much is under way."""
        for one in records:
            size = len(one.value)
            while self._flight and (
                len(self._flight) >= IN_FLIGHT_RECORDS_MAX
                or self._flight_bytes + size > IN_FLIGHT_BYTES_MAX
            ):
                self._land()
            future = self._producer.send(
                one.topic,
                value=one.value,
                key=one.key,
                headers=list(one.headers),
                partition=one.partition,
            )
            self._flight.append((future, size))
            self._flight_bytes += size

    def finish(self) -> None:
        """Wait until everything is acknowledged."""
        while self._flight:
            self._land()

    def close(self) -> None:
        """Let go of the producer."""
        self._producer.close()

    def _land(self) -> None:
        future, size = self._flight.popleft()
        future.get(WAIT_S)
        self._flight_bytes -= size


class RawReader:
    """A consumer of partitions from their beginning."""

    def __init__(self, servers: str, partitions: Sequence[TopicPartition]) -> None:
        self._consumer = KafkaConsumer(
            **client_settings(servers.split(","), PLAINTEXT), **consumer_settings(len(partitions))
        )
        assigned = [KafkaPartition(one.topic, one.partition) for one in partitions]
        self._consumer.assign(assigned)
        for each in assigned:
            self._consumer.seek(each, 0)

    def poll(self, timeout_ms: int = POLL_MS) -> list[Any]:
        """The client's own records."""
        fetched = self._consumer.poll(timeout_ms, max_records=POLL_RECORDS_MAX)
        return [record for part in fetched.values() for record in part]

    def close(self) -> None:
        """Let go of the consumer."""
        self._consumer.close(autocommit=False)


def drop_topics(servers: str, topics: Sequence[str]) -> None:
    """Delete what the bench left; nobody may write to these topics any more."""
    admin = KafkaAdminClient(bootstrap_servers=servers.split(","))
    try:
        admin.delete_topics(list(topics))
    finally:
        admin.close()
