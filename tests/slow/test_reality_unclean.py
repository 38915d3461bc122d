"""A leader dies, and then one is forced that lacks records: what was acknowledged is gone.

The first is what three brokers are for. The second no log survives, so it must be seen: readers say
that the log was cut, and a run ends with one line instead of going on from something else.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from kafka.errors import KafkaError

from dora_pipe.bus.kafka.bus import KafkaBus
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.schemas.topics import Topics
from tests.support.kafka_broker import BrokerError, KafkaCluster
from tests.support.user_run import WAIT_S, furnish, start, steps, until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.slow,
]

UNCLEAN = 1
LIMIT_S = 60.0
GONE_CODE = 5
"""Exit code of a broken promise."""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KafkaCluster]:
    with KafkaCluster(tmp_path / "brokers") as cluster:
        yield cluster
    gc.collect()


def force_another_log(
    cluster: KafkaCluster, parts: list[TopicPartition], meanwhile: Callable[[], None]
) -> None:
    behind, wiped, lost = cluster.nodes
    behind.kill()
    for topic, partition in parts:
        until_led(cluster, topic, partition)
    meanwhile()
    wiped.kill()
    lost.kill()
    for topic, partition in parts:
        shutil.rmtree(wiped.folder / "data" / f"{topic}-{partition}")
    for node in (behind, wiped):
        node.launch()
    for node in (behind, wiped):
        node.await_ready()
    for topic, partition in parts:
        until_led(cluster, topic, partition, force=True)


def until_led(cluster: KafkaCluster, topic: str, partition: int, *, force: bool = False) -> None:
    until_s = time.monotonic() + LIMIT_S
    while True:
        if force:
            with suppress(KafkaError), cluster.admin() as admin:
                admin.elect_leaders(UNCLEAN, {topic: [partition]}, raise_errors=False)
        with suppress(KafkaError, BrokerError):
            number = cluster.partition(topic, partition)["leader_id"]
            if any(node.node == number and node.running for node in cluster.nodes):
                return
        assert time.monotonic() < until_s, f"nobody leads {topic}/{partition}"
        time.sleep(0.2)


def test_a_run_whose_log_was_cut_ends_with_one_line(tmp_path: Path, cluster: KafkaCluster) -> None:
    pytest.importorskip("torch")
    (tmp_path / "user").mkdir()
    directory = furnish(tmp_path / "user")
    config = directory / "config.toml"
    config.write_text(f'{config.read_text()}[bus]\nurl = "kafka://{cluster.bootstrap}"\n')
    run = start(directory, "run", "config.toml", "-o", "run.steps=400")
    until(lambda: "step" in (directory / "said").read_text())
    until(lambda: len(steps(directory, "tiny")) >= 2)
    bus = KafkaBus(cluster.bootstrap.split(","))
    topics = Topics("tiny")
    parts = [
        TopicPartition(topic, partition)
        for topic in topics.all()
        for partition in range(bus.partitions(topic))
    ]
    bus.close()

    def meanwhile() -> None:
        before = len(steps(directory, "tiny"))
        until(lambda: len(steps(directory, "tiny")) >= before + 2)

    try:
        force_another_log(cluster, parts, meanwhile)
        code = run.wait(WAIT_S)
    finally:
        run.kill()
    text = (directory / "said").read_text()
    assert code == GONE_CODE, text
    errors = [line for line in text.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, text
    assert any(word in errors[0] for word in ("ends", "comes after", "gone", "chain")), errors
