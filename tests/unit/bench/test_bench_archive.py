"""The bench of archives reads back what it archived, and says so for each size."""

from __future__ import annotations

from pathlib import Path

from dora_pipe.bench.archive import PARTITIONS, bench_archive


def test_every_figure_is_of_all_records(tmp_path: Path) -> None:
    figures = bench_archive(tmp_path, record_bytes=(100, 5_000), total_bytes=20_000)
    whats = ["read SQLite", "archive", "read archive", "verify"]
    assert [one.what for one in figures] == whats * 2
    assert [one.records for one in figures] == [200] * 4 + [PARTITIONS] * 4
    assert all(one.mb_per_s > 0 and one.records_per_s > 0 for one in figures)
