"""Each of three brokers dies once under writers: all go on within seconds, nothing is lost."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest

from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.bus.port import Append, TopicPartition, TopicSpec
from dora_pipe.core.errors import BusError
from tests.support.kafka_broker import KafkaCluster

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
    pytest.mark.alone("the longest that a writer waits is measured"),
]

PARTITIONS = 3
AWAY_S = 9.0
BACK_S = 3.0
GAP_S_MAX = 20.0
"""Below the delivery limit of 30 s: a writer that waits that long has missed who took over."""


class Writing:
    """A thread that appends all the time; `acknowledged` by partition, and its longest append."""

    def __init__(self, servers: list[str], name: str | None) -> None:
        self.over = threading.Event()
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.gap_s = 0.0
        self.error: BusError | None = None
        self._bus = KafkaBus(servers)
        self._name = name
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            writer = self._bus.writer(exclusive=self._name)
            number = 0
            while not self.over.wait(0.02):
                began_s, partition = time.monotonic(), number % PARTITIONS
                value = f"{self._name}/{number}".encode()
                (offset,) = writer.append([Append(topic="t", partition=partition, value=value)])
                self.acknowledged[partition, offset] = value
                self.gap_s = max(self.gap_s, time.monotonic() - began_s)
                number += 1
        except BusError as error:
            self.error = error
        finally:
            self._bus.close()


def test_every_writer_goes_on_soon_whichever_broker_dies(tmp_path: Path) -> None:
    with KafkaCluster(tmp_path) as cluster:
        servers = cluster.bootstrap.split(",")
        bus = KafkaBus(servers)
        bus.create([TopicSpec(name="t", partitions=PARTITIONS)])
        writing = [Writing(servers, name) for name in ("a", "b", "c", None)]
        time.sleep(BACK_S)
        for node in cluster.nodes:
            node.kill()
            time.sleep(AWAY_S)
            node.start()
            for partition in range(PARTITIONS):
                cluster.await_in_sync("t", partition)
            time.sleep(BACK_S)
        for one in writing:
            one.over.set()
        for one in writing:
            one.thread.join()
        assert [one.error for one in writing] == [None] * 4
        assert max(one.gap_s for one in writing) < GAP_S_MAX
        found: dict[tuple[int, int], bytes] = {}
        parts = [TopicPartition("t", number) for number in range(PARTITIONS)]
        reader, ends = bus.reader(dict.fromkeys(parts, 0)), {tp: bus.end(tp) for tp in parts}
        while any(reader.position(tp) < end for tp, end in ends.items()):
            for record in reader.poll(timeout_s=1.0):
                found[record.partition, record.offset] = record.value
        for one in writing:
            assert len(one.acknowledged) > 100
            assert one.acknowledged.items() <= found.items()
        bus.close()
    gc.collect()
