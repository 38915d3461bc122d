"""Kafka brokers of tests; see infra/kafka.

The fixture `kafka_broker` shares one broker per session. Tests that kill brokers use `with
KafkaBroker(tmp_path) as broker`, or `KafkaCluster`.
"""

import fcntl
import gc
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import KafkaError

from infra.kafka import broker
from infra.kafka.broker import (
    CACHE,
    NODES,
    POLL_S,
    BrokerError,
    KafkaBroker,
    free_ports,
    jars,
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
    "values_of",
]

WAIT_S = 30.0
Found = TypeVar("Found")


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


def advertise(node: KafkaBroker, listener: str, address: str) -> None:
    """Send clients of a listener to another address."""
    addresses = {name: node.address(name) for name in node.listeners} | {listener: address}
    words = [f"{name}://{shown}" for name, shown in addresses.items()]
    node.settings["advertised.listeners"] = ",".join(words)


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
