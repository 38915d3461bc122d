"""Real brokers for a bench, as the repository's infra/kafka starts them; decides who is struck.

The package does not bring them along: their folder is found beside it, in a checkout. A broker
dies with the thread that started it, so the thread that made `Brokers` also starts again what was
killed (`mend`); `strike` may be called by another one.
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
from dora_pipe.bus.port import TopicPartition
from dora_pipe.core.errors import ResourceError

if TYPE_CHECKING:
    from infra.kafka.broker import KafkaBroker

CLUSTER: Final = 3

CHECKOUT_HINT: Final = "run it from a checkout that is installed with `pip install -e .`"


@dataclass(frozen=True, slots=True, kw_only=True)
class Struck:
    """A broker that was killed."""

    node: int
    pid: int
    led: tuple[TopicPartition, ...]
    """The partitions asked about that it led."""


class Brokers:
    """One broker or three, with their data below `folder`.

    Example: ``with closing(Brokers(folder, 1)) as brokers: brokers.start(); open_bus(brokers.url)``
    """

    def __init__(self, folder: Path, count: int) -> None:
        """Raises ResourceError where brokers cannot be started."""
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
        """Killed brokers, and when (monotonic seconds) each is started again."""

    @property
    def url(self) -> str:
        """Of the bus."""
        return f"kafka://{self._group.bootstrap}"

    @property
    def nodes(self) -> Sequence[KafkaBroker]:
        """Every broker."""
        return self._group.nodes

    def start(self) -> None:
        """Start all and return when they answer. Raises ResourceError."""
        from infra.kafka.broker import BrokerError

        try:
            self._group.start()
        except BrokerError as error:
            raise ResourceError(f"no broker starts: {str(error).splitlines()[0]}") from error

    def close(self) -> None:
        """Kill what runs; the data stays."""
        self._group.kill()

    def strike(self, target: TopicPartition, among: Sequence[str], *, down_s: float) -> Struck:
        """Kill -9 the broker that leads `target`; it stays down for so long.

        `among` are the topics whose partitions it may have led.
        """
        from infra.kafka.broker import KafkaBroker

        led: tuple[TopicPartition, ...] = ()
        if isinstance(self._group, KafkaBroker):
            victim = self._group
        else:
            victim = self._group.leader(*target)
            led = self._led_by(victim.node, among)
        return self._kill(victim, led, down_s)

    def strike_again(self, struck: Struck, *, down_s: float) -> Struck:
        """Kill a broker that has been started again."""
        victim = next(one for one in self.nodes if one.node == struck.node)
        return self._kill(victim, struck.led, down_s)

    def pid(self, node: int) -> int | None:
        """The process id of a broker, unless it is down."""
        with self._lock:
            found = next(one for one in self.nodes if one.node == node)
            return found.pid if node not in self._down and found.running else None

    def mend(self) -> None:
        """Start again what has been down for long enough; does not wait until it answers."""
        now_s = time.monotonic()
        with self._lock:
            due = [node for node, due_s in self._down.items() if due_s <= now_s]
            for node in self.nodes:
                if node.node in due:
                    node.launch()
                    del self._down[node.node]

    def heal(self) -> None:
        """Start what is down and return when every broker answers. Raises ResourceError."""
        from infra.kafka.broker import BrokerError

        with self._lock:
            self._down.clear()
            for node in self.nodes:
                if not node.running:
                    node.kill()  # one that ended by itself still has to be waited for
                    node.launch()
            try:
                for node in self.nodes:
                    node.await_ready()
            except BrokerError as error:
                raise ResourceError(f"a broker is gone: {str(error).splitlines()[0]}") from error

    def forget(self, topics: Sequence[str]) -> None:
        """Delete topics that nobody writes to any more."""
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
            found = admin.describe_topics(list(among))
        finally:
            admin.close()
        return tuple(
            TopicPartition(topic["name"], at["partition_index"])
            for topic in found
            for at in topic["partitions"]
            if at["leader_id"] == node
        )


def _find_infra() -> None:
    """Make the repository's folders importable. Raises ResourceError outside of a checkout."""
    root = Path(dora_pipe.__file__).resolve().parent
    if not (root / "infra" / "kafka" / "broker.py").is_file():
        raise ResourceError(
            "brokers are started from a checkout's infra/kafka, which is not here",
            hint=CHECKOUT_HINT,
        )
    if str(root) not in sys.path:
        sys.path.append(str(root))
