"""Runs three real brokers that replicate to each other, and decides nothing about their use.

with KafkaCluster(tmp_path) as cluster:
    cluster.leader("topic").kill()     # or .pause(), .stop()
    cluster.nodes[0].start()           # one of them comes back: same ports, same data
    cluster.await_in_sync("topic")
"""

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from infra.kafka.broker import (
    POLL_S,
    KafkaBroker,
    Listener,
    end_all,
    read_properties,
    start_all,
    tidied_client,
)
from infra.kafka.jars import HERE, BrokerError

_Found = TypeVar("_Found")

NODES = 3
PORT_STEP = 10_000
"""Between two brokers of a cluster on chosen ports: 29092, 39092, 49092."""
ELECTION_LIMIT_S = 30.0
"""A dead leader is missed after 3 s (broker.session.timeout.ms); a loaded machine takes longer."""


class KafkaCluster:
    """Brokers 1 to 3, each a controller too: topics have 3 replicas, of which 2 must answer.

    `listeners`, `settings`, `format_with` are as with `KafkaBroker`, for every broker alike.
    """

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        listeners: Sequence[Listener] = (),
        settings: Mapping[str, str] | None = None,
        format_with: Sequence[str] = (),
    ) -> None:
        ours = read_properties(HERE / "cluster.properties") | dict(settings or {})
        self.nodes = tuple(
            KafkaBroker(
                folder / f"node-{node}",
                node=node,
                port=None if port is None else port + (node - 1) * PORT_STEP,
                listeners=listeners,
                settings=ours,
                format_with=format_with,
            )
            for node in range(1, NODES + 1)
        )
        for node in self.nodes:
            node.peers = self.nodes

    @property
    def bootstrap(self) -> str:
        """`host:port,host:port,host:port`; known once the cluster was started."""
        return ",".join(node.bootstrap for node in self.nodes)

    def addresses(self, listener: str) -> str:
        """The same for another listener."""
        return ",".join(node.address(listener) for node in self.nodes)

    def start(self) -> None:
        """Start every broker that does not run and return when all take part.

        Raises BrokerError when one does not in time.
        """
        start_all(self.nodes)

    def stop(self) -> None:
        """Ask all brokers to shut down, then wait for each."""
        end_all(self.nodes, signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL for all of them at once."""
        end_all(self.nodes, signal.SIGKILL)

    def leader(self, topic: str, partition: int = 0) -> KafkaBroker:
        """The broker that leads a partition. Raises BrokerError if none does for too long."""
        return self._until(lambda: self._leader(topic, partition), f"{topic} has no leader")

    def in_sync(self, topic: str, partition: int = 0) -> list[int]:
        """Node numbers of the replicas that are in sync."""
        return sorted(self._partition(topic, partition)["isr_nodes"])

    def await_in_sync(self, topic: str, partition: int = 0, count: int = NODES) -> None:
        """Return when so many replicas are in sync. Raises BrokerError if they never are."""
        words = f"{topic} has no {count} replicas in sync"
        self._until(lambda: len(self.in_sync(topic, partition)) >= count or None, words)

    @contextmanager
    def admin(self) -> Iterator[Any]:
        """A kafka-python admin client on the brokers that run."""
        from kafka import KafkaAdminClient

        alive = [node.bootstrap for node in self.nodes if node.running]
        with tidied_client():
            admin = KafkaAdminClient(bootstrap_servers=alive, request_timeout_ms=5_000)
            try:
                yield admin
            finally:
                admin.close()

    def __enter__(self) -> "KafkaCluster":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _leader(self, topic: str, partition: int) -> KafkaBroker | None:
        number = self._partition(topic, partition)["leader_id"]
        found = [node for node in self.nodes if node.node == number and node.running]
        return found[0] if found else None

    def _partition(self, topic: str, partition: int) -> Any:
        with self.admin() as admin:
            partitions = admin.describe_topics([topic])[0]["partitions"]
        return next(one for one in partitions if one["partition_index"] == partition)

    def _until(self, look: Callable[[], _Found | None], words: str) -> _Found:
        from kafka.errors import KafkaError

        limit = time.monotonic() + ELECTION_LIMIT_S
        while time.monotonic() < limit:
            try:
                found = look()
            except KafkaError:
                found = None
            if found is not None:
                return found
            time.sleep(POLL_S)
        raise BrokerError(f"{words} after {ELECTION_LIMIT_S:.0f} s")
