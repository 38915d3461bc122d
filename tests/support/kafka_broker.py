"""Kafka brokers of tests; see infra/kafka.

The fixture `kafka_broker` shares one broker per session. Tests that kill brokers use `with
KafkaBroker(tmp_path) as broker`, or `KafkaCluster`; both draw free ports.
"""

import fcntl
import gc
import os
import secrets
import shlex
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

from kafka import KafkaAdminClient
from kafka.errors import KafkaError

from infra.kafka import broker
from infra.kafka.broker import (
    CACHE,
    NODES,
    POLL_S,
    PORT_STEP,
    BrokerError,
    is_free,
    jars,
    java,
    missing_tools,
    tool,
)
from tests.support.tidy import ROOT

__all__ = [
    "ROOT",
    "BrokerError",
    "KafkaBroker",
    "KafkaCluster",
    "advertise",
    "archive_classes",
    "free_ports",
    "missing_tools",
    "tidied_client",
    "tool",
    "write_tools",
]

WAIT_S = 120.0
PORTS = range(10_000, 32_000)
"""Ports below those of outgoing connections, which could take one while a broker is down."""
TOOLS: Mapping[str, str] = {
    "kafka-acls.sh": "org.apache.kafka.tools.AclCommand",
    "kafka-configs.sh": "kafka.admin.ConfigCommand",
    "kafka-topics.sh": "org.apache.kafka.tools.TopicCommand",
}
Found = TypeVar("Found")


def free_ports(count: int, brokers: int = 1) -> list[int]:
    """Draw free TCP ports of the loopback in a row; those `PORT_STEP` above are free for others."""
    while True:
        first = secrets.choice(PORTS[: len(PORTS) - (brokers - 1) * PORT_STEP])
        ports = [first + number for number in range(count)]
        if all(is_free(port + PORT_STEP * node) for port in ports for node in range(brokers)):
            return ports


def write_tools(folder: Path) -> None:
    """Write Kafka's own commands that the pages use as scripts for a PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, started in TOOLS.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {shlex.join(java(started))} "$@"\n')
        (folder / name).chmod(0o755)


@cache
def archive_classes() -> None:
    """Keep the loaded classes of one broker, which halves the start of those after it."""
    archive = jars().with_suffix(".jsa")
    with (CACHE / "classes.lock").open("w") as lock, TemporaryDirectory(dir=CACHE) as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if archive.exists():
            return
        part = Path(folder) / "part.jsa"
        started = KafkaBroker(Path(folder))
        started.format()
        with patch.dict(os.environ, JDK_JAVA_OPTIONS=f"-XX:ArchiveClassesAtExit={part}"):
            started.start()
        started.stop()
        if part.exists():  # not where it had to be killed
            part.rename(archive)


@contextmanager
def tidied_client() -> Iterator[None]:
    """Collect the sockets of refused connections, which kafka-python leaves to the collector."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def advertise(node: broker.KafkaBroker, listener: str, address: str) -> None:
    """Send clients of a listener to another address."""
    addresses = {name: node.address(name) for name in node.listeners} | {listener: address}
    words = [f"{name}://{shown}" for name, shown in addresses.items()]
    node.settings["advertised.listeners"] = ",".join(words)


class KafkaBroker(broker.KafkaBroker):
    def __init__(
        self,
        folder: Path,
        listeners: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, free_ports(2 + len(listeners or ()))[0])
        self.listeners.update(listeners or {})
        self.settings.update(settings or {})


class KafkaCluster(broker.KafkaCluster):
    def __init__(
        self,
        folder: Path,
        listeners: Mapping[str, str] | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder, free_ports(2 + len(listeners or ()), NODES)[0])
        for node in self.nodes:
            node.listeners.update(listeners or {})
            node.settings.update(settings or {})

    def leader(self, topic: str, partition: int = 0) -> broker.KafkaBroker:
        def look() -> broker.KafkaBroker | None:
            number = self.partition(topic, partition)["leader_id"]
            return next((node for node in self.nodes if node.node == number and node.running), None)

        return _until(look, f"{topic} has no leader")

    @contextmanager
    def admin(self) -> Iterator[Any]:
        alive = [node.bootstrap for node in self.nodes if node.running]
        with tidied_client():
            admin = KafkaAdminClient(bootstrap_servers=alive, request_timeout_ms=30_000)
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
