"""The bus bench measures every phase of every bus and size; how fast they are is not asserted."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench import bus as bench
from dora_pipe.bench.bus import bench_bus
from dora_pipe.bus.sqlite import SqliteBus
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


def test_reading_finds_what_was_appended(tmp_path: Path) -> None:
    path = tmp_path / "bench.sqlite"
    one, many, read = bench_bus([f"sqlite:{path}"], record_bytes=[10], seconds=0.05)
    assert 0 < read.records <= one.records + many.records + 2
    bus = SqliteBus(path)
    assert len(bus.topics()) == 1
    bus.close()


def test_a_phase_ends_where_its_bytes_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "PHASE_BYTES_MAX", 3_000)
    one, many, read = bench_bus(["memory:"], record_bytes=[1_000], seconds=60)
    assert (one.records, many.records) == (3, bench.BATCH_RECORDS)
    assert read.records >= 3


def test_a_log_that_exists_is_never_benched(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite"
    path.touch()
    with pytest.raises(UsageError, match="exists"):
        bench_bus([f"sqlite:{path}"], record_bytes=[10], seconds=1)
    assert path.stat().st_size == 0
