"""Tests of compose.yaml: its commands, settings and environment as plain processes."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.compose import Containers, Service, read
from tests.support.kafka_broker import KafkaBroker, KafkaCluster, tool

pytest.importorskip("torch")
pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
]

VARIABLES = {"DORA_PIPE_STEPS": "3", "DORA_PIPE_SFT_STEPS": "20"}
LIMIT_S = 900.0
OUTSIDE = "PLAINTEXT_HOST"
HEALTH = "/opt/kafka/bin/kafka-broker-api-versions.sh --bootstrap-server localhost:9092 > /dev/null"


@contextmanager
def brokers_of(
    profile: str, services: dict[str, Service], folder: Path
) -> Iterator[KafkaBroker | KafkaCluster]:
    ours = [
        service
        for service in services.values()
        if service.is_broker and profile in service.profiles
    ]
    settings = ours[0].plain_settings()
    listeners = {OUTSIDE: "PLAINTEXT"}
    if len(ours) == 1:
        with KafkaBroker(folder, listeners=listeners, settings=settings) as broker:
            yield broker
    else:
        with KafkaCluster(folder, listeners=listeners, settings=settings) as cluster:
            yield cluster
    gc.collect()


@pytest.mark.parametrize(("profile", "replicas"), [("single", 1), ("cluster", 3)])
def test_the_demo_of_the_compose_file_trains_and_is_proved(
    profile: str, replicas: int, tmp_path: Path
) -> None:
    services = read(VARIABLES)
    roles = {name: service for name, service in services.items() if service.profiles == ("demo",)}
    assert len(roles) == 7
    with brokers_of(profile, services, tmp_path / "brokers") as brokers:
        nodes = [brokers] if isinstance(brokers, KafkaBroker) else list(brokers.nodes)
        for service in services.values():
            if service.is_broker:
                assert service.raw["healthcheck"]["test"] == ["CMD-SHELL", HEALTH]
        health = "org.apache.kafka.tools.BrokerApiVersionsCommand"
        assert tool(health, "--bootstrap-server", nodes[0].address(OUTSIDE))
        containers = Containers(tmp_path, roles, {"kafka:19092": brokers.bootstrap})
        containers.run(LIMIT_S)
        written = replication(brokers.bootstrap, "demo.trajectories")
    assert set(containers.codes) == set(roles)
    assert "demo.trajectories: 4 partitions" in containers.log_text("topics")
    assert written == {replicas}
    report = containers.log_text("audit")
    assert "finished" in report
    assert "steps                                 3" in report
    assert (containers.volume("runs") / "demo" / "config.toml").is_file()
    assert any(containers.volume("store").rglob("*.safetensors"))
    mine = tmp_path / "containers" / "worker-0"
    assert not list(mine.rglob("config.toml")), "a worker needs no run directory"


def replication(bootstrap: str, topic: str) -> set[int]:
    from kafka import KafkaAdminClient

    admin = KafkaAdminClient(bootstrap_servers=bootstrap.split(","))
    try:
        partitions = admin.describe_topics([topic])[0]["partitions"]
        return {len(partition["replica_nodes"]) for partition in partitions}
    finally:
        admin.close()
