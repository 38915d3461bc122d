"""Kafka brokers of kill rounds, from infra/kafka of the checkout.

A broker dies with the thread that started it: the thread that made `Brokers` also restarts them
(`mend`). Other threads may call `strike`.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import dora_pipe
from dora_pipe.core.errors import ResourceError
from dora_pipe.core.pure.records import TopicPartition

if TYPE_CHECKING:
    from infra.kafka.broker import KafkaBroker

CLUSTER: Final = 3

CHECKOUT_HINT: Final = "run it from a checkout that is installed with `pip install -e .`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    node: int
    pid: int
    led: tuple[TopicPartition, ...]
    """Partitions that it led, of those asked about."""


class Brokers:
    def __init__(self, folder: Path, count: int) -> None:
        _find_infra()
        from tests.support.kafka_broker import KafkaBroker, KafkaCluster, missing_tools

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
    def nodes(self) -> Sequence[KafkaBroker]:
        return self._group.nodes

    def start(self) -> None:
        """Start all brokers and wait until they answer. Raises ResourceError."""
        from infra.kafka.broker import BrokerError

        try:
            self._group.start()
        except BrokerError as error:
            raise ResourceError(f"no broker starts: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        self._group.kill()

    def strike(self, target: TopicPartition, among: Sequence[str], *, down_s: float) -> Struck:
        """Kill -9 the leader of `target` for `down_s`; `among` are the topics whose leaders are
        recorded."""
        from infra.kafka.broker import KafkaBroker

        led: tuple[TopicPartition, ...] = ()
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
            broker = next(broker for broker in self.nodes if broker.node == node)
            return broker.pid if node not in self._down and broker.running else None

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
        from infra.kafka.broker import BrokerError

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
        from kafka import KafkaAdminClient

        admin = KafkaAdminClient(bootstrap_servers=self._group.bootstrap.split(","))
        try:
            admin.delete_topics(list(topics))
        finally:
            admin.close()

    def _kill(self, victim: KafkaBroker, led: tuple[TopicPartition, ...], down_s: float) -> Struck:
        with self._lock:
            pid = victim.pid
            victim.kill()
            self._down[victim.node] = time.monotonic() + down_s
        return Struck(node=victim.node, pid=pid, led=led)

    def _led_by(self, node: int, among: Sequence[str]) -> tuple[TopicPartition, ...]:
        from kafka import KafkaAdminClient

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


def _find_infra() -> None:
    root = Path(dora_pipe.__file__).resolve().parent
    if not (root / "infra" / "kafka" / "broker.py").is_file():
        raise ResourceError(
            "brokers are started from a checkout's infra/kafka, which is not here",
            hint=CHECKOUT_HINT,
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
