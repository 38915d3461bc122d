"""How kafka-python's clients are made, called and discarded: durability and limits."""

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

from dora_pipe.bus.checks import BATCH_ROOM_BYTES
from dora_pipe.bus.kafka.security import KafkaSecurity
from dora_pipe.bus.port import Append, TopicSpec

CONNECT_LIMIT_S = 10.0
"""For the first contact with the cluster."""

DELIVERY_LIMIT_S = 30.0
"""An append that was not acknowledged by then has an unknown outcome."""

COMMIT_LIMIT_S_MIN = 1.0
"""A commit has what its append left of the delivery limit, and never less."""

TRANSACTION_SLACK_S = 2.0
"""The broker aborts an append that its dead writer left open so long after a living one would have
given it up; until then readers stop before it. Shorter, and a broker that is away for a while would
cost its writers their role. It looks for such appends at intervals of its own: every 10 s by
default, every second with infra/kafka/server.properties."""

QUIET_LIMIT_S = 2.0
"""A reader that heard nothing for so long asks whether the broker is there: `poll` alone is silent
in an outage, and then leases must stand still."""

PROBE_LIMIT_S = 1.0

NEWS_S = 0.05
"""Between two looks for what one broker knows and another will know in a moment."""

BATCH_BYTES = BATCH_ROOM_BYTES // 2
"""Of one producer batch."""

LINGER_MS = 5
"""A producer waits so long for more records of the same call; the end of a call waits for none."""

FETCH_BYTES = 32 * 1024 * 1024
"""Of one poll, unless its caller says otherwise."""

ANSWER_BYTES = 8 * 1024 * 1024
"""Asked of a broker at a time; a larger record comes by itself. The C library takes what is much
larger from the kernel anew for every answer: eight page faults, 15 us, per record of 10 kB."""

RECORD_BYTES_MAX = 64 * 1024 * 1024

RETRY_MS = 5  # with the default of 100 one transaction in a hundred takes .1 s
RECONNECT_MS_MAX = 1000  # the default of 30 s keeps a role away long after its broker is back
_REPLICAS = 3

for _name in ("kafka", "kafka.net", "kafka.protocol"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
"""The client tells every connection and every retry; what matters of that reaches the user as one
of our errors. The last two also tell every byte on the wire, PLAIN passwords among them: they stay
silent even if somebody asks `kafka` for more."""


def client_settings(servers: Sequence[str], security: KafkaSecurity) -> dict[str, Any]:
    """What every client is made with; holds the password, so make the client and let go of it."""
    return {
        "bootstrap_servers": list(servers),
        "bootstrap_timeout_ms": ms(CONNECT_LIMIT_S),
        "reconnect_backoff_max_ms": RECONNECT_MS_MAX,
        **security.client_settings(),
    }


class PatientClient(KafkaNetClient):  # type: ignore[misc]  # the client has no types
    """The network client of a producer or consumer, by the client's setting `kafka_client`.

    A broker that dies is still the leader of partitions for a while when the cluster names it no
    more. Where the client raises then, its sender would never ask for news; and where the broker
    of a transaction's coordinator refuses the connection, it would forget the request.
    """

    def maybe_connect(self, node_id: Any, **settings: Any) -> None:
        """Begin a connection; ask for news of a broker that the cluster does not name."""
        try:
            super().maybe_connect(node_id, **settings)
        except kafka_errors.UnknownBrokerIdError:
            self.cluster.request_update()

    def await_ready(self, node_id: Any, timeout_ms: float | None = 30_000) -> bool:
        """Whether there is a connection now; a refused one is no error, and asked a bit later."""
        try:
            return bool(super().await_ready(node_id, timeout_ms=timeout_ms))
        except kafka_errors.KafkaError:
            time.sleep(NEWS_S)  # the cluster may name the dead one for some seconds
            return False

    def throttle_s(self) -> float:
        """Return the seconds for which a broker's quota still delays this client."""
        brokers = self.cluster.brokers()
        return max((self.throttle_delay(each.node_id) for each in brokers), default=0.0) / 1000


def opened(kind: Callable[..., Any], settings: Mapping[str, Any]) -> tuple[Any, PatientClient]:
    """Return an admin client, producer or consumer, and its network client.

    The library leaves the network client behind, with its thread, where it finds no cluster.
    """
    made: list[PatientClient] = []

    def network(**own: Any) -> PatientClient:
        made.append(PatientClient(**own))
        return made[-1]

    try:
        return kind(kafka_client=network, **settings), made[-1]
    except kafka_errors.KafkaError:
        for each in made:
            each.close()
        raise


def producer_settings(name: str | None, delivery_limit_s: float) -> dict[str, Any]:
    """What a producer is made with beside that: idempotent, in transactions if it has a name."""
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
    """What a consumer is made with beside that: assigned, committed records only, never a group."""
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
    """Everything that durability rests on is said, whatever the cluster's defaults are."""
    replicas = min(_REPLICAS, brokers)
    return {
        "num_partitions": spec.partitions,
        "replication_factor": replicas,
        "configs": {
            "min.insync.replicas": str(max(1, replicas - 1)),
            "max.message.bytes": str(spec.record_bytes_max + BATCH_ROOM_BYTES),
            "cleanup.policy": "delete",
            # By the broker's clock: it refuses what a clock that is hours ahead stamps.
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
    """Close a producer; what it still holds fails at its delivery limit, behind our back."""

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
    """Run a call that the client itself would wait for without end."""
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
    """Milliseconds, as the client counts."""
    return round(seconds * 1000)
