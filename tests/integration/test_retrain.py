"""Retraining a recorded run: a directory with weights, steps and the change, equal every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.analysis.change import EMPTY, Change
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.analysis.retrain import STEPS as STEP_LINES
from dora_pipe.analysis.retrain import RetrainedStep, retrain
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.recovery import read_commits
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.inherit import CHANGE, RetrainedModel
from dora_pipe.store.model_dir import weights_digest
from dora_pipe.store.store import PolicyStore
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.worker import VirtualClock


@pytest.fixture
def source(recorded: RecordedRun) -> Iterator[SourceRun]:
    with closing(recorded.open()) as bus:
        yield SourceRun(
            bus=bus,
            topics=recorded.topics,
            store=PolicyStore(recorded.store),
            make=lambda started: SimulatedLearner(),
            clock=VirtualClock(),
        )


def about(out: Path) -> RetrainedModel:
    return msgspec.json.decode((out / CHANGE).read_bytes(), type=RetrainedModel)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def names(source: SourceRun, step: int) -> list[str]:
    (commit,) = read_commits(
        source.bus, source.topics, source.history.notes[step : step + 1], source.clock
    )
    return [trajectory.trajectory for group in commit.groups for trajectory in group.trajectories]


def test_an_empty_change_gives_the_runs_own_digests(source: SourceRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = retrain(source, range(STEPS), EMPTY, out)
    assert [result.digest for result in done] == [note.digest for note in source.history.notes]
    assert all(result.equal for result in done)
    lines = (out / STEP_LINES).read_bytes().splitlines()
    assert [msgspec.json.decode(line, type=RetrainedStep) for line in lines] == done
    assert about(out).weights == done[-1].digest == weights_digest(out)
    assert (about(out).run, about(out).first, about(out).last) == ("recorded", 0, STEPS - 1)
    assert len(about(out).log_chain) == 64
    assert about(out).change_digest == EMPTY.digest


def changes(source: SourceRun) -> list[Change]:
    (first, second, *_), last = names(source, 5), names(source, 7)
    return [
        Change(settings={"trainer.learning_rate": 3e-5}),
        Change(rewards={first: 5.0, second: None}),
        Change(drop=frozenset({last[0].rpartition("-")[0]})),
    ]


@pytest.mark.parametrize("kind", range(3), ids=["settings", "rewards", "drop"])
def test_a_change_gives_other_weights_and_the_same_ones_twice(
    source: SourceRun, tmp_path: Path, kind: int
) -> None:
    change = changes(source)[kind]
    done = retrain(source, range(5, 8), change, tmp_path / "one")
    assert [result.step for result in done] == [5, 6, 7]
    assert not done[-1].equal
    retrain(source, range(5, 8), change, tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_an_unfinished_directory_is_started_over(
    source: SourceRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def killed(step: int) -> None:
        if step == 6:
            raise KeyboardInterrupt

    out, change = tmp_path / "out", changes(source)[0]
    with pytest.raises(KeyboardInterrupt):
        retrain(source, range(5, 8), change, out, report=killed)
    assert not (out / CHANGE).exists()
    done = retrain(source, range(5, 8), change, out)
    assert "is unfinished: starting over" in capsys.readouterr().err
    assert [result.step for result in done] == [5, 6, 7]
    with pytest.raises(UsageError, match="holds a retrained model"):
        retrain(source, range(5, 8), change, out)


def test_a_folder_of_something_else_is_suspended(source: SourceRun, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    with pytest.raises(UsageError, match="is not an empty directory"):
        retrain(source, range(5, 8), EMPTY, tmp_path)
    assert files(tmp_path) == {"thesis.txt": b"words"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": frozenset({"g9999999999"})}, "g9999999999 is trained in none of the steps"),
        ({"settings": {"run.steps": 3}}, "run.steps is not a setting of a training step"),
    ],
)
def test_what_cannot_be_changed_is_refused_by_name(
    source: SourceRun, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        retrain(source, range(5, 8), Change(**change), tmp_path / "out")
