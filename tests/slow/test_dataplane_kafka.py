"""`bench dataplane` on a real broker: every phase, both sides, nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.dataplane.measure import Setup, bench_dataplane
from dora_pipe.bus import open_bus
from tests.support.kafka_broker import KafkaBroker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kafka,
    pytest.mark.alone("it compares the rates of two writers"),
]

RATIO_MIN = 0.4
"""Far below what bench/results/benchmarks.md has: this machine may be doing anything meanwhile."""


def test_layer_and_planes_are_measured_and_their_topics_deleted(
    kafka_broker: KafkaBroker, tmp_path: Path
) -> None:
    url = f"kafka://{kafka_broker.bootstrap}"
    setup = Setup(kafka=url, tokens=[2_048], seconds=0.5, repeats=1, folder=tmp_path)
    measured = bench_dataplane(setup, lambda line: None)
    assert [one.phase for one in measured.layers] == ["append", "read", "through"]
    for layer in measured.layers:
        assert layer.ratio > RATIO_MIN, layer
        assert layer.bytes == pytest.approx(measured.planes[0].bytes, rel=0.01)
    (delay,) = measured.delays
    assert 0 < delay.bus_p50_ms <= delay.bus_p99_ms
    assert 0 < delay.raw_p50_ms <= delay.raw_p99_ms
    assert [one.plane for one in measured.planes] == ["kafka", "sqlite", "pipe"]
    kafka, sqlite, pipe = measured.splits
    assert kafka.broker_us is not None and kafka.broker_us > 0
    assert (sqlite.broker_us, pipe.broker_us) == (0.0, 0.0)
    bus = open_bus(url)
    assert [topic for topic in bus.topics() if topic.startswith("bench-")] == []
    bus.close()
