"""Tests of commands that write files: they reject existing output unless forced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun

FILES = ("parquet", "traces")


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_there_is_replaced_when_told_and_whole(
    kind: str, recorded: RecordedRun, call: Call, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    target.write_text("mine")
    code, out, err = call("export", kind, recorded.directory, target)
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"error: {target} exists",
        "hint: choose another, or overwrite it with --force",
    ]
    assert target.read_text() == "mine"
    code, _, err = call("export", kind, recorded.directory, target, "--force")
    assert code == 0, err
    assert len(target.read_bytes()) > 1000
    assert list(tmp_path.iterdir()) == [target]
    (tmp_path / "folder").mkdir()
    assert call("export", kind, recorded.directory, tmp_path / "folder", "--force")[0] == 2


def test_a_folder_with_something_in_it_is_written_into_when_told(
    recorded: RecordedRun, call: Call, tmp_path: Path
) -> None:
    target = tmp_path / "mine"
    target.mkdir()
    (target / "config.json").write_text("mine")
    (target / "notes").write_text("mine")
    words = ("export", "policy", recorded.directory, "3", target)
    code, _, err = call(*words)
    assert code == 2
    assert err.startswith(f"error: {target} is not empty\nhint: choose another, or o")
    assert {path.name: path.read_text() for path in target.iterdir()} == {
        "config.json": "mine",
        "notes": "mine",
    }
    code, _, err = call(*words, "--force")
    assert code == 0, err
    assert (target / "notes").read_text() == "mine"
    assert len(list(target.iterdir())) > 2


def test_what_fails_leaves_the_old_file(copy: RecordedRun, call: Call, tmp_path: Path) -> None:
    for path in (copy.store / "contributions").iterdir():
        path.unlink()
    target = tmp_path / "mine.parquet"
    target.write_text("mine")
    assert call("export", "parquet", copy.directory, target, "--force")[0] != 0
    assert target.read_text() == "mine"
