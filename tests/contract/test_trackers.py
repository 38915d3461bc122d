"""What every tracker promises: the rows it is given are there, once, whoever asks later."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_pipe.observe.trackers.sink import Figure, Spread, TrackedRun
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
    """Each implementation in a folder of its own."""
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


def _row(step: int) -> dict[str, Figure]:
    groups = Spread(((0, 3), (2, step + 1)))  # nobody has staleness 1
    return {"reward/raw": step / 4, "train/loss": -0.5, "staleness/groups": groups}


def _give(harness: Harness, steps: list[int], run: TrackedRun = RUN) -> int:
    """One export; how many rows were there before it."""
    tracker = harness.open()
    try:
        there = tracker.begin(run)
        for step in steps:
            tracker.step(step, _row(step), at_ns=RUN.started_ns + step * SECOND_NS)
    finally:
        tracker.close()
    return there


def _rows(*steps: int) -> Rows:
    return [(step, _row(step)) for step in steps]


def test_rows_are_read_back_as_they_were_given(harness: Harness) -> None:
    assert _give(harness, [0, 1, 2]) == 0
    assert harness.rows() == _rows(0, 1, 2)


def test_an_export_that_goes_on_is_told_what_is_there(harness: Harness) -> None:
    assert [_give(harness, [0, 1]), _give(harness, []), _give(harness, [2])] == [0, 2, 2]
    assert _give(harness, []) == 3
    assert harness.rows() == _rows(0, 1, 2)


def test_a_step_may_be_smaller_than_the_one_before(harness: Harness) -> None:
    """An evaluation of version 2 is known when step 5 is."""
    _give(harness, [4, 5, 2])
    _give(harness, [6, 4])
    assert harness.rows() == _rows(4, 5, 2, 6, 4)


def test_an_export_without_rows_leaves_nothing_to_be_counted(harness: Harness) -> None:
    assert [_give(harness, []), _give(harness, [])] == [0, 0]
    assert _give(harness, [0]) == 0
    assert harness.rows() == _rows(0)


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
    _give(harness, [0, 1])
    assert _give(harness, [7], other) == 0
    assert harness.rows() == _rows(0, 1)
    assert harness.rows(other) == _rows(7)
