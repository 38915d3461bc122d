"""Tests of the bus benchmark: every phase, bus and size."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.bus import bench_bus
from dora_pipe.core.errors import UsageError


def test_every_phase_of_every_bus_and_size_has_a_row(tmp_path: Path) -> None:
    urls = ["memory:", f"sqlite:{tmp_path}/bench.sqlite"]
    figures = bench_bus(urls, record_bytes=[100, 20_000], seconds=0.01)
    phases = ["append one by one", "append in batches", "read"]
    assert [(figure.bus, figure.record_bytes, figure.phase) for figure in figures] == [
        (bus, size_bytes, phase)
        for bus in ("memory", "sqlite")
        for size_bytes in (100, 20_000)
        for phase in phases
    ]
    for figure in figures:
        assert figure.records > 0 and figure.cpu_us > 0
        assert figure.mb_per_s == pytest.approx(figure.records_per_s * figure.record_bytes / 1e6)


def test_a_log_that_exists_is_never_benched(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.touch()
    with pytest.raises(UsageError, match="exists"):
        bench_bus([f"sqlite:{path}"], record_bytes=[10], seconds=1)
    assert path.stat().st_size == 0
