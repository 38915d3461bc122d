"""A process that serves rows of large data holds none of them.

Goal: a Parquet file of 2 GB costs a task process less than 300 MB. Method: `bench data` on a file
of an eighth of that; what a process holds must not grow with the data, so the bound is far lower.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.data import bench_data

pytestmark = [pytest.mark.slow, pytest.mark.alone("it compares two times and measures memory")]

PARQUET_MB = 256
TASK_MB_MAX = 100
PREPARING_MB_MAX = 600


def test_memory_of_a_task_process_does_not_grow_with_its_data(tmp_path: Path) -> None:
    figure = bench_data(tmp_path, PARQUET_MB)
    assert figure.parquet_mb >= PARQUET_MB
    assert figure.task_mb < TASK_MB_MAX
    assert figure.preparing_mb < PREPARING_MB_MAX
    assert figure.next_start_s < figure.first_start_s
