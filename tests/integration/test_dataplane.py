"""`bench dataplane` with real processes; how fast they are is not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora_pipe.bench.commands import app
from dora_pipe.bench.dataplane.measure import MODULE
from dora_pipe.bench.dataplane.process import Assemble
from dora_pipe.bench.support import Child
from dora_pipe.core.errors import ResourceError


@pytest.mark.slow
def test_every_plane_has_a_row_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["dataplane", "--tokens", "64", "--seconds", "0.1", "--repeats", "1", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert result.stderr == "64 tokens\n"
    (row,) = (json.loads(line) for line in result.stdout.splitlines())
    assert_sound(row)
    assert row["plane"] == "sqlite"
    assert list(tmp_path.iterdir()) == []


def assert_sound(row: dict[str, Any]) -> None:
    assert row["mb_per_s"] == pytest.approx(row["trajectories_per_s"] * row["bytes"] / 1e6, 0.1)
    assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert row["cpu_us"] > 0


def test_a_process_that_cannot_begin_ends_the_bench_with_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Assemble(address=f"sqlite:{tmp_path}/none.sqlite", run="r", batch=1)
    with pytest.raises(ResourceError, match="ended early"), Child(MODULE, task) as child:
        child.answer(str)
    assert "error: " in capfd.readouterr().err
