"""RatioMetrics by the command line: read back with tensorboard's own reader, and gone on with."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dora_pipe.observe.trackers.sink import EVENTS
from tests.support.command_line import Call, caller
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.trackers import FakeWandb, event_rows


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Call:
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
    read = accumulator(folder, size_guidance={"scalars": 0})  # all of them
    read.Reload()
    assert [Scalar.step for Scalar in read.Scalars("train/loss")] == list(range(STEPS))
    assert {Scalar.step for Scalar in read.Scalars("evaluation/reward")} >= {0, STEPS}
    assert len(read.Scalars("staleness/groups_0")) > 0
    rows = event_rows(tmp_path / "tb" / "recorded")
    assert err == f"tb/recorded: {len(rows)} rows\n"


@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_a_second_export_writes_the_same_rows_once(
    recorded: RecordedRun, call: Call, tmp_path: Path, follow: tuple[str, ...]
) -> None:
    pytest.importorskip("tensorboard")
    pytest.importorskip("tensorboardX")
    words = ("export", "tensorboard", recorded.directory, "tb", *follow)
    folder = tmp_path / "tb" / "recorded"
    assert call(*words)[0] == 0
    rows = event_rows(folder)
    (file,) = folder.glob(EVENTS)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])  # killed
    assert call(*words)[2] == f"tb/recorded: {len(rows)} rows\n"
    assert event_rows(folder) == rows


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
        f"W&B project arithmetic: 0 rows, {len(run.rows)} already exported\n"
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
