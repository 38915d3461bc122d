"""Tests of every tracker: each exported row is stored once."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.observe.trackers.sink import TrackedRun
from tests.support.trackers import (
    RUN,
    FakeWandbHarness,
    Harness,
    RealWandbHarness,
    Rows,
    TensorBoardHarness,
)

SECOND_NS = 10**9


@pytest.fixture(params=["tensorboard", "fake wandb", "fake wandb online", "wandb"])
def harness(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Harness:
    match request.param:
        case "tensorboard":
            pytest.importorskip("tensorboardX")
            pytest.importorskip("tensorboard")
            return TensorBoardHarness(tmp_path)
        case "fake wandb":
            return FakeWandbHarness(tmp_path, monkeypatch)
        case "fake wandb online":
            return FakeWandbHarness(tmp_path, monkeypatch, mode="online")
        case _:
            return RealWandbHarness(tmp_path, monkeypatch)


def _row(step: int) -> dict[str, float]:
    return {"reward/raw": step / 4, "train/loss": -0.5}


def _export(harness: Harness, steps: list[int], run: TrackedRun = RUN) -> None:
    tracker = harness.open()
    try:
        for step in steps[tracker.begin(run) :]:
            tracker.step(step, _row(step), at_ns=RUN.started_ns + step * SECOND_NS)
        assert tracker.rows == len(steps)
    finally:
        tracker.close()


def _rows(*steps: int) -> Rows:
    return [(step, _row(step)) for step in steps]


@pytest.mark.parametrize("exports", [[3], [2, 2, 3], [0, 0, 1], [4, 5]], ids=str)
def test_rows_are_there_once_however_many_exports_there_were(
    harness: Harness, exports: list[int]
) -> None:
    steps = [4, 5, 2, 6, 4]  # an evaluation of version 2 is known when step 5 is
    for there in exports:
        _export(harness, steps[:there])
    assert harness.rows() == _rows(*steps[: exports[-1]])


def test_closing_twice_or_before_it_began_does_nothing(harness: Harness) -> None:
    harness.open().close()
    tracker = harness.open()
    tracker.begin(RUN)
    tracker.step(0, _row(0), at_ns=RUN.started_ns)
    tracker.close()
    tracker.close()
    assert harness.rows() == _rows(0)


def test_runs_of_two_names_stand_beside_each_other(harness: Harness) -> None:
    other = TrackedRun(name="other", started_ns=RUN.started_ns, config={})
    _export(harness, [0, 1])
    _export(harness, [7], other)
    assert (harness.rows(), harness.rows(other)) == (_rows(0, 1), _rows(7))
