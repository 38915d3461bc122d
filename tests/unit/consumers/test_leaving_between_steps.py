"""Tests that a trainer frees its GPU before it announces so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from tests.support.trainer_stage import TrainerStage, train


class LeavingLearner(SimulatedLearner):
    def __init__(self, stage: TrainerStage) -> None:
        super().__init__()
        self._stage = stage
        self.calls: list[str] = []

    def leave_device(self) -> None:
        self.calls.append(f"leave at {len(self._stage.commits())}")

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        self.calls.append(f"train {batch.step}")
        return super().train(batch, settings)

    def save_weights(self, path: Path) -> Any:
        self.calls.append("save")
        return super().save_weights(path)


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    stage = TrainerStage(tmp_path / "stage")
    stage.start_run()
    return stage


def test_the_device_is_left_when_it_is_restored_and_before_every_commit(
    stage: TrainerStage,
) -> None:
    learner = LeavingLearner(stage)
    train(stage, stage.trainer(trainer=learner, leaves_device=True), 0, 1)
    first, *rest = learner.calls
    assert first == "leave at 0"
    assert rest == ["train 0", "save", "leave at 0", "train 1", "save", "leave at 1"]


def test_a_trainer_that_goes_on_leaves_when_it_has_trained_again_what_was_committed(
    stage: TrainerStage,
) -> None:
    train(stage, stage.trainer(), 0)
    learner = LeavingLearner(stage)
    train(stage, stage.trainer(trainer=learner, leaves_device=True), 1)
    assert learner.calls == ["train 0", "leave at 1", "train 1", "save", "leave at 1"]
