"""What the Kafka client would forget is tried again."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from kafka import errors as kafka_errors

from dora_pipe.bus.kafka import client as kafka_client
from dora_pipe.bus.kafka.client import keep_requests


def producer_whose(await_ready: Callable[..., bool]) -> Any:
    """As much of a producer as is asked."""
    client = SimpleNamespace(await_ready=await_ready)
    return SimpleNamespace(_sender=SimpleNamespace(_client=client))


def test_a_coordinator_behind_a_closed_door_is_not_ready_instead_of_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)

    def refuse(node: str, timeout_ms: int) -> bool:
        raise kafka_errors.KafkaConnectionError(f"Node {node} not ready after {timeout_ms} ms")

    producer = producer_whose(refuse)
    keep_requests(producer)
    assert producer._sender._client.await_ready("coordinator-1", timeout_ms=30_000) is False
    assert slept == [kafka_client.NEWS_S], "and it is not asked again at once"


def test_a_coordinator_that_is_there_is_ready_at_once() -> None:
    asked: list[tuple[str, int]] = []

    def ready(node: str, timeout_ms: int) -> bool:
        asked.append((node, timeout_ms))
        return True

    producer = producer_whose(ready)
    keep_requests(producer)
    assert producer._sender._client.await_ready("coordinator-1", timeout_ms=5) is True
    assert asked == [("coordinator-1", 5)]
