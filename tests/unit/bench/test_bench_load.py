"""What a load takes of a worker's memory stays below its largest tensor and a fifth."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.bench.load import bench_load
from dora_pipe.core.errors import UsageError


@pytest.mark.slow
def test_load_takes_no_more_than_the_largest_tensor(tmp_path: Path) -> None:
    figures = list(bench_load(tmp_path, ["bfloat16"], 0.3))
    assert [one.way for one in figures] == ["read", "noted"]
    assert all(0 < one.share < 1.2 for one in figures)
    assert figures[0].file_mb > 8 * figures[0].largest_mb / 1.3


def test_type_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no type 'int8'"):
        list(bench_load(tmp_path, ["int8"], 0.3))
