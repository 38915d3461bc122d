"""Tests of kafka-python clients without a broker."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka import errors as kafka_errors

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.checks import BATCH_ROOM_BYTES
from dora_pipe.bus.kafka.access import our_errors
from dora_pipe.bus.kafka.bus import _retry_without_leader
from dora_pipe.bus.kafka.client import (
    PatientClient,
    bounded,
    client_settings,
    discard,
    opened,
    topic_settings,
)
from dora_pipe.bus.kafka.security import PLAINTEXT
from dora_pipe.core.errors import Fenced, OutcomeUnknown


@pytest.mark.parametrize("kind", [KafkaAdminClient, KafkaConsumer, KafkaProducer])
def test_a_client_that_finds_no_cluster_leaves_no_thread(kind: Callable[..., Any]) -> None:
    before = set(threading.enumerate())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        server = f"127.0.0.1:{silent.getsockname()[1]}"
        settings = client_settings([server], PLAINTEXT)
        with pytest.raises(kafka_errors.KafkaTimeoutError):
            opened(kind, {**settings, "bootstrap_timeout_ms": 50})
    assert set(threading.enumerate()) <= before


def test_a_broker_that_is_gone_is_one_that_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    client = PatientClient(bootstrap_servers="127.0.0.1:1")
    asked: list[bool] = []
    monkeypatch.setattr(client.cluster, "request_update", lambda: asked.append(True))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    client.maybe_connect(3)
    assert client.await_ready(3, timeout_ms=5) is False
    assert len(asked) == 2 and client.throttle_s() == 0.0
    client.close()


def test_a_question_to_such_a_broker_is_asked_again_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = [kafka_errors.UnknownBrokerIdError(3), kafka_errors.UnknownBrokerIdError(3)]

    def call() -> str:
        if answers:
            raise answers.pop()
        return "offset"

    assert _retry_without_leader(call) == "offset"
    answers.append(kafka_errors.UnknownBrokerIdError(3))
    monkeypatch.setattr("dora_pipe.bus.kafka.bus.LEADER_LIMIT_S", 0.0)
    with pytest.raises(kafka_errors.UnknownBrokerIdError):
        _retry_without_leader(call)


class Stuck:
    def __init__(self) -> None:
        self.free, self.closed, self.tries = threading.Event(), threading.Event(), 0

    def close(self, timeout: float) -> None:
        self.tries += 1
        if not self.free.wait(0.01):
            raise kafka_errors.KafkaTimeoutError
        self.closed.set()


def test_a_producer_that_cannot_be_closed_now_is_closed_later() -> None:
    producer = Stuck()
    discard(producer, 1.0)
    assert not producer.closed.is_set() and producer.tries >= 1
    producer.free.set()
    assert producer.closed.wait(30)


def test_a_commit_that_never_returns_is_left_at_its_limit() -> None:
    release = threading.Event()

    def hang() -> None:
        release.wait(60)

    with pytest.raises(OutcomeUnknown), our_errors(OutcomeUnknown):
        bounded(hang, 0.01)
    release.set()


def test_a_commit_s_own_error_comes_through() -> None:
    def fail() -> None:
        raise kafka_errors.ProducerFencedError

    with pytest.raises(Fenced), our_errors(OutcomeUnknown):
        bounded(fail, 5)


@pytest.mark.parametrize(
    ("brokers", "replicas", "in_sync"), [(1, 1, 1), (2, 2, 1), (3, 3, 2), (5, 3, 2)]
)
def test_topics_are_as_durable_as_the_cluster_allows(
    brokers: int, replicas: int, in_sync: int
) -> None:
    settings = topic_settings(TopicSpec(name="t", partitions=4, max_record_bytes=100), brokers)
    assert settings["replication_factor"] == replicas
    assert settings["num_partitions"] == 4
    assert settings["configs"] == {
        "min.insync.replicas": str(in_sync),
        "max.message.bytes": str(100 + BATCH_ROOM_BYTES),
        "cleanup.policy": "delete",
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": "-1",
        "retention.bytes": "-1",
        "unclean.leader.election.enable": "false",
        "compression.type": "producer",
    }
