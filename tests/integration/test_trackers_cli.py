"""Figures by the command line: read back with tensorboard's own reader, and gone on with."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import pytest

from dora_pipe.observe.trackers.sink import EVENTS, ROWS
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.trackers import FakeWandb, event_rows


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
    """`dora-pipe`, in this process and a folder of its own."""
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capsys)


def test_tensorboards_own_reader_finds_every_step(
    recorded: RecordedRun, call: Call, tmp_path: Path
) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator"
    ).EventAccumulator
    code, out, err = call("export", "tensorboard", recorded.directory, "tb")
    assert (code, out) == (0, ""), err
    folder = str(tmp_path / "tb" / "recorded")
    read = accumulator(folder, size_guidance={"histograms": 0, "scalars": 0})  # all of them
    read.Reload()
    assert [one.step for one in read.Scalars("train/loss")] == list(range(STEPS))
    assert {one.step for one in read.Scalars("evaluation/reward")} >= {0, STEPS}
    assert [one.step for one in read.Histograms("staleness/groups")] == list(range(STEPS))
    rows = event_rows(tmp_path / "tb" / "recorded")
    assert err == f"tb/recorded: {len(rows)} rows\n"


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_a_second_export_goes_on_where_the_first_was_killed(
    recorded: RecordedRun, call: Call, tmp_path: Path, follow: tuple[str, ...]
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("tensorboardX")
    words = ("export", "tensorboard", recorded.directory, "tb", *follow)
    assert call(*words)[0] == 0
    folder = tmp_path / "tb" / "recorded"
    whole = event_rows(folder)
    there = len(whole) // 2
    (file,) = folder.glob(EVENTS)
    count = json.loads((folder / ROWS).read_text())
    ends = ends_of(file)[1 + there]  # after the head and the configuration
    (folder / ROWS).write_text(json.dumps(count | {"rows": there, "bytes": ends}))
    code, _, err = call(*words)
    assert code == 0
    assert err == f"tb/recorded: {len(whole) - there} rows, {there} were there\n"
    assert event_rows(folder) == whole
    assert call(*words)[2] == f"tb/recorded: 0 rows, {len(whole)} were there\n"
    assert event_rows(folder) == whole


def ends_of(file: Path) -> list[int]:
    """Where each record of an event file ends."""
    data, at, ends = file.read_bytes(), 0, []
    while at < len(data):
        at += 8 + 4 + struct.unpack_from("<Q", data, at)[0] + 4
        ends.append(at)
    return ends


def test_wandb_gets_the_same_rows_offline(
    recorded: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake.module())
    for name in ("WANDB_MODE", "WANDB_DIR"):
        monkeypatch.delenv(name, raising=False)
    words = ("export", "wandb", recorded.directory, "arithmetic")
    code, out, err = call(*words)
    assert (code, out) == (0, ""), err
    ((_, run),) = fake.runs.items()
    steps = [row["step"] for row in run.rows if "train/loss" in row]
    assert steps == list(range(STEPS)) and run.finished
    assert fake.calls[0]["mode"] == "offline"
    assert call(*words, "--follow")[2] == (
        f"W&B project arithmetic: 0 rows, {len(run.rows)} were there\n"
    )


@pytest.mark.parametrize(
    ("command", "hint"),
    [("tensorboard", "pip install -e '.[trackers]'"), ("wandb", "pip install wandb")],
)
def test_an_absent_package_is_one_line_and_a_hint(
    recorded: RecordedRun, call: Call, monkeypatch: pytest.MonkeyPatch, command: str, hint: str
) -> None:
    for name in ("tensorboardX", "tensorboardX.event_file_writer", "wandb"):
        monkeypatch.setitem(sys.modules, name, None)
    code, out, err = call("export", command, recorded.directory, "x")
    assert (code, out) == (2, "")
    first, second = err.splitlines()
    assert first.startswith("error: ") and first.endswith(" not installed")
    assert second == f"hint: {hint}"
