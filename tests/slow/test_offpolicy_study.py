"""The off-policy study as a command: tiny, stopped in the middle, and taken up again."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")

from dora_pipe.bench.studies.cells import CELLS
from tests.support.user_run import bench

pytestmark = [pytest.mark.slow, pytest.mark.pure]

LIMIT_S = 600


def study(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    own = ("--quick", "--steps", "2", "--out", "study", "--etas", "0,2")
    return bench(path, "offpolicy", *own, *words, wait_s=LIMIT_S)


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (path / "study" / CELLS).read_text().splitlines()]


def test_a_study_is_measured_and_taken_up_where_it_was_stopped(tmp_path: Path) -> None:
    done = study(tmp_path, "--objectives", "grpo", "--json")
    assert done.returncode == 0, done.stderr
    first = rows(tmp_path)
    assert [(row["objective"], row["eta"]) for row in first] == [("grpo", 0), ("grpo", 2)]
    assert [json.loads(line)["eta"] for line in done.stdout.splitlines()] == [0, 2]
    assert {row["samples"] for row in first} == {64}, "every cell gets equal samples"
    assert first[0]["rewards"][0] == first[1]["rewards"][0]  # type: ignore[index]

    done = study(tmp_path, "--objectives", "grpo,tis")
    assert done.returncode == 0, done.stderr
    assert "grpo, eta" not in done.stderr, "a cell was measured twice"
    assert rows(tmp_path)[:2] == first and len(rows(tmp_path)) == 4
    assert "2 steps of 32 samples" in done.stdout
    table = [line.split() for line in done.stdout.splitlines() if line.startswith("tis ")]
    assert [words[1] for words in table][-2:] == ["0", "2"]

    other = study(tmp_path, "--objectives", "grpo", "-o", "trainer.learning_rate=1e-3")
    assert other.returncode != 0
    assert "other settings" in other.stderr
