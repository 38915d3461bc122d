"""Kafka brokers of kill rounds, from infra/kafka of the checkout.

A broker dies with the thread that started it: the thread that made `Brokers` also restarts them
(`mend`). Other threads may call `strike`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kafka import KafkaAdminClient

from dora_pipe.core.errors import ResourceError
from dora_pipe.core.pure.records import TopicPartition
from infra.kafka import broker
from tests.support.kafka_broker import BrokerError, KafkaBroker, KafkaCluster, missing_tools

CLUSTER: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    node: int
    pid: int
    led: tuple[TopicPartition, ...]
    """Partitions that it led, of those asked about."""


class Brokers:
    def __init__(self, folder: Path, count: int) -> None:
        missing = missing_tools()
        if missing:
            raise ResourceError(
                f"a broker needs {' and '.join(missing)}, not found on this machine",
                hint="install Java 17 and Maven",
            )
        self._group = KafkaCluster(folder) if count == CLUSTER else KafkaBroker(folder)
        self._lock = threading.Lock()
        self._down: dict[int, float] = {}
        """Killed brokers with their restart time (monotonic seconds)."""

    @property
    def url(self) -> str:
        return f"kafka://{self._group.bootstrap}"

    @property
    def nodes(self) -> Sequence[broker.KafkaBroker]:
        return self._group.nodes

    def start(self) -> None:
        """Start all brokers and wait until they answer. Raises ResourceError."""
        try:
            self._group.start()
        except BrokerError as error:
            raise ResourceError(f"no broker starts: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._group.kill()

    def strike(self, target: TopicPartition, among: Sequence[str], *, down_s: float) -> Struck:
        """Kill -9 the leader of `target` for `down_s`; `among` are the topics whose leaders are
        recorded."""
        led: tuple[TopicPartition, ...] = ()
        victim: broker.KafkaBroker
        if isinstance(self._group, KafkaBroker):
            victim = self._group
        else:
            victim = self._group.leader(*target)
            led = self._led_by(victim.node, among)
        return self._kill(victim, led, down_s)

    def strike_again(self, struck: Struck, *, down_s: float) -> Struck:
        victim = next(node for node in self.nodes if node.node == struck.node)
        return self._kill(victim, struck.led, down_s)

    def pid(self, node: int) -> int | None:
        with self._lock:
            process = next(entry.process for entry in self.nodes if entry.node == node)
            if process is None or process.poll() is not None or node in self._down:
                return None
            return process.pid

    def mend(self) -> None:
        """Restart brokers whose downtime is over, without waiting for answers."""
        now_s = time.monotonic()
        with self._lock:
            due = [node for node, due_s in self._down.items() if due_s <= now_s]
            for node in self.nodes:
                if node.node in due:
                    node.launch()
                    del self._down[node.node]

    def heal(self) -> None:
        """Start stopped brokers and wait until all answer. Raises ResourceError."""
        with self._lock:
            self._down.clear()
            for node in self.nodes:
                if not node.running:
                    node.kill()  # also reap one that ended by itself
                    node.launch()
            try:
                for node in self.nodes:
                    node.await_ready()
            except BrokerError as error:
                raise ResourceError(f"a broker is gone: {str(error).splitlines()[0]}") from error

    def forget(self, topics: Sequence[str]) -> None:
        admin = KafkaAdminClient(bootstrap_servers=self._group.bootstrap.split(","))
        try:
            admin.delete_topics(list(topics))
        finally:
            admin.close()

    def _kill(
        self, victim: broker.KafkaBroker, led: tuple[TopicPartition, ...], down_s: float
    ) -> Struck:
        with self._lock:
            assert victim.process is not None, "the broker was never started"
            victim.kill()
            self._down[victim.node] = time.monotonic() + down_s
        return Struck(node=victim.node, pid=victim.process.pid, led=led)

    def _led_by(self, node: int, among: Sequence[str]) -> tuple[TopicPartition, ...]:
        admin = KafkaAdminClient(bootstrap_servers=self._group.bootstrap.split(","))
        try:
            topics = admin.describe_topics(list(among))
        finally:
            admin.close()
        return tuple(
            TopicPartition(topic["name"], position["partition_index"])
            for topic in topics
            for position in topic["partitions"]
            if position["leader_id"] == node
        )
