"""Tests of single trackers: torn files, other runs, modes, missing packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.observe.trackers.sink import (
    CONFIG,
    EVENTS,
    QUIET,
    TensorBoardTracker,
    TrackedRun,
    WandbTracker,
)
from tests.support.trackers import PROJECT, RUN, FakeWandbHarness, TensorBoardHarness

FIGURES = {"train/loss": 0.5}


@pytest.fixture
def board(tmp_path: Path) -> TensorBoardHarness:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    return TensorBoardHarness(tmp_path)


def _write(board: TensorBoardHarness, *steps: int) -> None:
    tracker = board.open()
    tracker.begin(RUN)
    for step in steps:
        tracker.step(step, FIGURES, at_ns=RUN.started_ns)
    tracker.close()


def _files(board: TensorBoardHarness) -> list[Path]:
    return sorted((board.folder / RUN.name).glob(EVENTS))


def test_what_a_killed_export_wrote_is_written_again(board: TensorBoardHarness) -> None:
    _write(board, 0, 1)
    (file,) = _files(board)
    with file.open("ab") as torn:
        torn.write(b"half a row")
    _write(board, 0, 1, 2)
    assert board.rows() == [(0, FIGURES), (1, FIGURES), (2, FIGURES)]


def test_another_run_of_the_name_is_not_mixed_with_it(board: TensorBoardHarness) -> None:
    _write(board, 0)
    later = TrackedRun(name=RUN.name, started_ns=RUN.started_ns + 1, config={})
    tracker = board.open()
    with pytest.raises(UsageError, match="holds another run"):
        tracker.begin(later)
    tracker.close()
    assert len(_files(board)) == 1


def test_two_exports_at_once_do_not_write_the_same_rows(board: TensorBoardHarness) -> None:
    first, second = board.open(), board.open()
    assert first.begin(RUN) == 0
    with pytest.raises(UsageError, match="another export writes"):
        second.begin(RUN)
    second.close()
    first.close()
    third = board.open()
    assert third.begin(RUN) == 0
    third.close()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()
    with pytest.raises(ResourceError, match="cannot be written"):
        TensorBoardTracker(tmp_path / "file").begin(RUN)


def test_the_configuration_is_a_text_once(board: TensorBoardHarness) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _write(board, 0)
    _write(board, 0, 1)
    read = EventAccumulator(str(board.folder / RUN.name))
    read.Reload()
    (text,) = read.Tensors(f"{CONFIG}/text_summary")
    assert b'"name": "demo"' in text.tensor_proto.string_val[0]
    assert [Scalar.step for Scalar in read.Scalars("train/loss")] == [0, 1]


def test_what_a_tracker_lacks_is_named_with_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "tensorboardX.event_file_writer", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match="tensorboardX is not installed") as failed:
        TensorBoardTracker(tmp_path)
    assert failed.value.hint == "pip install -e '.[trackers]'"
    with pytest.raises(UsageError, match="wandb is not installed") as failed:
        WandbTracker(PROJECT, {})
    assert failed.value.hint == "pip install wandb"


@pytest.mark.parametrize(
    ("expected", "mode", "resume"),
    [("", "offline", None), ("online", "online", "allow"), ("disabled", "disabled", None)],
)
def test_wandb_is_offline_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: str, mode: str, resume: str | None
) -> None:
    harness = FakeWandbHarness(tmp_path, monkeypatch, mode=expected)
    tracker = harness.open()
    tracker.begin(RUN)
    tracker.step(0, FIGURES, at_ns=RUN.started_ns)
    tracker.close()
    (call,) = harness.fake.calls
    assert (call["mode"], call["resume"], call["project"]) == (mode, resume, PROJECT)
    assert (call["id"], call["name"], call["config"]) == (RUN.id, "demo", RUN.config)
    marks = list((tmp_path / "wandb").iterdir())
    assert len(marks) == (mode == "offline")


def test_wandb_says_nothing_of_the_machine_unless_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = FakeWandbHarness(tmp_path, monkeypatch)
    harness.environment["WANDB_CONSOLE"] = "wrap"
    harness.open()
    assert {name: harness.environment[name] for name in QUIET} == QUIET | {"WANDB_CONSOLE": "wrap"}


def test_what_wandb_refuses_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = FakeWandbHarness(tmp_path, monkeypatch, mode="online")
    harness.fake.refuses = "no API key"
    with pytest.raises(ResourceError, match="W&B: no API key"):
        harness.open().begin(RUN)
    with pytest.raises(UsageError, match="no name of a project"):
        WandbTracker("team/project", harness.environment)
    harness.environment["WANDB_DIR"] = str(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="there is no folder"):
        harness.open().begin(RUN)
