"""Tests of `bench audit`: valid log, correct metrics, constant memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.audit.auditor import audit
from dora_pipe.bench.audit import bench_audit, bench_memory
from dora_pipe.bench.audit_log import LogPlan, write_log
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.schemas.topics import Topics

GROWTH_BYTES_MAX = 100
"""Bytes per trajectory: below any Python object, above the allocator's 45 bytes of gaps."""


@pytest.mark.parametrize(
    "plan",
    [
        LogPlan(trajectories=60, tokens=1),
        LogPlan(trajectories=60, tokens=300, group_size=3, per_step=5, partitions=1, workers=1),
        LogPlan(trajectories=100, tokens=9, max_staleness=0, turn_share=0.1),
    ],
)
def test_synthetic_run_holds_from_the_first_record_to_the_last(plan: LogPlan) -> None:
    bus = MemoryBus()
    written = write_log(bus, plan)
    report = audit(bus, Topics(plan.run), None)
    assert [violation.line for violation in report.violations] == []
    assert report.finished
    assert report.steps == written.steps == plan.steps
    assert report.records == written.trajectories
    assert report.record_bytes == written.trajectory_bytes
    assert report.plans == report.rounds == written.rounds


def test_figures_compare_every_way_with_reading_alone(tmp_path: Path) -> None:
    url = f"sqlite:{tmp_path / 'log.sqlite'}"
    figures = bench_audit([url], tokens=[64], trajectories=128, repeats=1)
    ways = {figure.way: figure for figure in figures}
    assert list(ways) == ["the bus alone", "audit", "audit --quick"]
    alone = ways["the bus alone"]
    assert alone.of_reading == 1.0
    for figure in figures:
        assert figure.trajectories == 128
        assert figure.of_reading == pytest.approx(
            figure.trajectories_per_s / alone.trajectories_per_s
        )


@pytest.mark.slow
@pytest.mark.pure
def test_memory_of_an_audit_does_not_grow_with_the_run(tmp_path: Path) -> None:
    memory = bench_memory(tmp_path, trajectories=80_000)
    assert memory.bytes_per_trajectory <= GROWTH_BYTES_MAX, memory
