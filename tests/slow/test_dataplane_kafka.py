"""Tests of `bench dataplane` on a real broker: every plane, with a clean end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane
from dora_pipe.bus import open_bus
from tests.support.kafka_broker import KafkaBroker

pytestmark = [pytest.mark.slow, pytest.mark.kafka]


def test_planes_are_measured_and_their_topics_deleted(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    url = f"kafka://{kafka_broker.bootstrap}"
    setup = Setup(kafka=url, tokens=[2_048], seconds=0.5, repeats=1, folder=tmp_path)
    kafka, sqlite = bench_dataplane(setup, lambda line: None)
    assert (kafka.plane, sqlite.plane) == ("kafka", "sqlite")
    assert kafka.keeps == "acks=all" and kafka.trajectories_per_s > 0
    assert kafka.bytes == pytest.approx(sqlite.bytes, rel=0.01)
    bus = open_bus(url)
    assert [topic for topic in bus.topics() if topic.startswith("bench-")] == []
    bus.close()
