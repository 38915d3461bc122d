"""Clients of kafka-python: settings for durability, and time limits."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from kafka import KafkaProducer
from kafka import errors as kafka_errors
from kafka.net.compat import KafkaNetClient

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import BATCH_ROOM_BYTES
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.core.pure.records import Append

CONNECT_LIMIT_S = 10.0
DELIVERY_LIMIT_S = 30.0
"""Time after which an unacknowledged append has an unknown outcome."""

COMMIT_LIMIT_S_MIN = 1.0
"""Minimum time for a commit after a slow append."""

TRANSACTION_SLACK_S = 2.0
"""Time after the delivery limit at which the broker aborts a dead writer's transaction. Lower
values let a short outage fence writers. Brokers check every 10 s by default."""

QUIET_LIMIT_S = 2.0
"""Silence after which a reader probes the broker: leases must not expire in an outage."""

PROBE_LIMIT_S = 1.0

NEWS_S = 0.05
BATCH_BYTES = BATCH_ROOM_BYTES // 2
LINGER_MS = 5
"""Time to wait for more records; the end of an append flushes."""

FETCH_BYTES = 32 * 1024 * 1024
ANSWER_BYTES = 8 * 1024 * 1024
"""Fetch response size; larger buffers cost page faults, 15 us per record of 10 kB."""

RECORD_BYTES_MAX = 64 * 1024 * 1024

RETRY_MS = 5  # with the default of 100 one transaction in 100 takes 0.1 s
RECONNECT_MS_MAX = 1000  # the default of 30 s delays roles after a broker restart
_REPLICAS = 3

for _name in ("kafka", "kafka.net", "kafka.protocol"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
"""Silenced: our errors suffice, and the last two loggers would log all bytes, including PLAIN
passwords."""


def client_settings(servers: Sequence[str], security: KafkaSecurity) -> dict[str, Any]:
    """Return the settings of every client, including the password: do not keep them."""
    return {
        "bootstrap_servers": list(servers),
        "bootstrap_timeout_ms": ms(CONNECT_LIMIT_S),
        "reconnect_backoff_max_ms": RECONNECT_MS_MAX,
        **security.client_settings(),
    }


class PatientClient(KafkaNetClient):  # type: ignore[misc]  # the client has no types
    """Network client of producers and consumers (setting `kafka_client`).

    A dead broker remains leader for a while. The client would raise then without refreshing its
    metadata, and drop requests whose coordinator refuses connections.
    """

    def maybe_connect(self, node_id: Any, **settings: Any) -> None:
        """Connect; refresh the metadata if the broker is unknown."""
        try:
            super().maybe_connect(node_id, **settings)
        except kafka_errors.UnknownBrokerIdError:
            self.cluster.request_update()

    def await_ready(self, node_id: Any, timeout_ms: float | None = 30_000) -> bool:
        """Return whether the connection is ready."""
        try:
            return bool(super().await_ready(node_id, timeout_ms=timeout_ms))
        except kafka_errors.KafkaError:
            time.sleep(NEWS_S)  # the metadata may list a dead broker for seconds
            return False

    def throttle_s(self) -> float:
        """Return how long a quota delays this client."""
        brokers = self.cluster.brokers()
        return max((self.throttle_delay(each.node_id) for each in brokers), default=0.0) / 1000


def opened(kind: Callable[..., Any], settings: Mapping[str, Any]) -> tuple[Any, PatientClient]:
    """Return a client and its network client, which the library leaks if it finds no cluster."""
    clients: list[PatientClient] = []

    def network(**own: Any) -> PatientClient:
        clients.append(PatientClient(**own))
        return clients[-1]

    try:
        return kind(kafka_client=network, **settings), clients[-1]
    except kafka_errors.KafkaError:
        for each in clients:
            each.close()
        raise


def producer_settings(name: str | None, delivery_limit_s: float) -> dict[str, Any]:
    """Return producer settings: idempotent, transactional with a name."""
    return {
        "acks": "all",
        "enable_idempotence": True,
        "transactional_id": name,
        "transaction_timeout_ms": ms(delivery_limit_s + TRANSACTION_SLACK_S),
        "delivery_timeout_ms": ms(delivery_limit_s) + LINGER_MS,
        "request_timeout_ms": ms(delivery_limit_s),
        "max_block_ms": ms(CONNECT_LIMIT_S),
        "max_request_size": RECORD_BYTES_MAX,
        "batch_size": BATCH_BYTES,
        "linger_ms": LINGER_MS,
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
        "retry_backoff_ms": RETRY_MS,
    }


def consumer_settings(partitions: int) -> dict[str, Any]:
    """Return consumer settings: committed records only, no group."""
    return {
        "isolation_level": "read_committed",
        "group_id": None,
        "enable_auto_commit": False,
        "auto_offset_reset": "none",
        "allow_auto_create_topics": False,
        "metrics_enabled": False,
        "fetch_max_bytes": ANSWER_BYTES,
        "max_partition_fetch_bytes": ANSWER_BYTES // max(1, partitions),
        "retry_backoff_ms": RETRY_MS,
    }


def topic_settings(spec: TopicSpec, brokers: int) -> dict[str, Any]:
    """Return settings for durability, independent of cluster defaults."""
    replicas = min(_REPLICAS, brokers)
    return {
        "num_partitions": spec.partitions,
        "replication_factor": replicas,
        "configs": {
            "min.insync.replicas": str(max(1, replicas - 1)),
            "max.message.bytes": str(spec.max_record_bytes + BATCH_ROOM_BYTES),
            "cleanup.policy": "delete",
            # A broker rejects client timestamps that are hours ahead.
            "message.timestamp.type": "LogAppendTime",
            "retention.ms": "-1",
            "retention.bytes": "-1",
            "unclean.leader.election.enable": "false",
            "compression.type": "producer",
        },
    }


def send(producer: KafkaProducer, record: Append) -> Any:
    return producer.send(
        record.topic,
        value=record.value,
        key=record.key,
        headers=list(record.headers),
        partition=record.partition,
    )


def discard(producer: KafkaProducer, limit_s: float) -> None:
    """Close in the background; unsent records fail at the delivery limit."""

    def close() -> None:
        while True:
            with suppress(kafka_errors.KafkaError):
                producer.close(timeout=limit_s)
                break

    try:
        producer.close(timeout=PROBE_LIMIT_S)
    except kafka_errors.KafkaError:
        threading.Thread(target=close, name="kafka-close", daemon=True).start()


def bounded(call: Callable[[], None], limit_s: float) -> None:
    """Run a call with a deadline that the client lacks."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except kafka_errors.KafkaError as error:
            done.set_exception(error)

    threading.Thread(target=run, name="kafka-commit", daemon=True).start()
    done.result(limit_s)


def ms(seconds: float) -> int:
    """Return milliseconds."""
    return round(seconds * 1000)
