"""`bench dataplane` with real processes; how fast they are is not asserted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dora_pipe.bench.dataplane.process import Assemble, Child
from dora_pipe.cli.app import app
from dora_pipe.core.errors import ResourceError


@pytest.mark.slow
def test_every_plane_has_a_row_and_a_split_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["bench", "dataplane", "--tokens", "64", "--seconds", "0.1", "--repeats", "1", "--json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.output
    assert said.stderr == "64 tokens\n"
    rows: list[dict[str, Any]] = [json.loads(line) for line in said.stdout.splitlines()]
    assert not any("raw_mb_per_s" in row for row in rows), "there is no broker, so no layer"
    planes = [row for row in rows if "trajectories_per_s" in row]
    splits = [row for row in rows if "encode_us" in row]
    assert [row["plane"] for row in planes] == [row["plane"] for row in splits]
    assert [row["plane"] for row in planes] == ["sqlite", "pipe"]
    for row in planes:
        assert row["mb_per_s"] == pytest.approx(row["trajectories_per_s"] * row["bytes"] / 1e6, 0.1)
        assert 0 < row["p50_ms"] <= row["p99_ms"]
        assert row["cpu_s_per_gb"] > 0
    for row in splits:
        stages = ("encode_us", "append_us", "fetch_us", "decode_us", "assembly_us")
        assert all(row[stage] > 0 for stage in stages), row
        assert row["broker_us"] == 0, "nobody else works for these"
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_cannot_begin_ends_the_bench_with_one_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    task = Assemble(address=f"sqlite:{tmp_path}/none.sqlite", run="r", batch=1)
    with pytest.raises(ResourceError, match="ended early"), Child(task) as child:
        child.await_ready()
    assert "error: " in capfd.readouterr().err
