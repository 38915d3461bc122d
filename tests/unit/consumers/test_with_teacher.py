"""Tests of a trainer with a teacher, including retraining."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.consumers.contributions import SCHEMA, TEACHER, read_contributions
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.learners.with_teacher import WEIGHT, with_teacher
from dora_pipe.core.errors import PolicyError, ReplayDiverged
from dora_pipe.core.pure.machine import StopAsked
from tests.support.teachers import HashTeacher
from tests.support.trainer_stage import TrainerStage, digests, train, train_killed

TEACHER_SETTINGS: dict[str, Any] = {WEIGHT: 0.5}


def staged(folder: Path) -> TrainerStage:
    stage = TrainerStage(folder)
    stage.settings = dict(TEACHER_SETTINGS)
    stage.start_run()
    return stage


def learner_with(teacher: HashTeacher) -> Any:
    return with_teacher(SimulatedLearner(), teacher)


def columns(stage: TrainerStage) -> list[list[dict[str, Any]]]:
    return [
        read_contributions(stage.store.blob("contributions", commit.contributions.sha256))
        for commit in stage.commits()
    ]


def test_what_the_teacher_says_is_kept_with_the_step_and_summed_up(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    trainer = stage.trainer(trainer=learner_with(HashTeacher()))
    train(stage, trainer, 0)
    (commit,), (rows,) = stage.commits(), columns(stage)
    assert commit.numerics["teacher"] == "hash"
    gaps = []
    for row in rows:
        assert len(row[TEACHER]) == row["tokens"]
        gaps += [-4.5 - entry for entry in row[TEACHER]]
    assert commit.metrics["teacher_kl"] == pytest.approx(sum(gaps) / len(gaps))


def test_step_without_a_weight_asks_nobody_and_has_the_files_that_it_had(tmp_path: Path) -> None:
    for settings_ in ({}, {WEIGHT: 0.0}):
        stage = TrainerStage(tmp_path / str(len(settings_)))
        stage.settings = dict(settings_)
        stage.start_run()
        teacher = HashTeacher()
        train(stage, stage.trainer(trainer=learner_with(teacher)), 0)
        assert not teacher.asked
        assert [set(row) for (row, *_) in columns(stage)] == [set(SCHEMA.names)]
        assert "teacher_kl" not in stage.commits()[0].metrics


@given(st.lists(st.integers(0, 25), max_size=12), st.booleans())
@settings(max_examples=10)
def test_killed_at_any_tick_replay_takes_what_was_said_and_comes_to_the_same_weights(
    tmp_path_factory: pytest.TempPathFactory, lives: list[int], forgets: bool
) -> None:
    steps = 4
    stage = staged(tmp_path_factory.mktemp("killed"))
    teacher = HashTeacher(forgets=forgets)
    train_killed(
        stage,
        [*lives, 3000],
        lambda: stage.trainer(trainer=learner_with(teacher), checkpoint_every=2),
        steps=steps,
    )
    assert [commit.step for commit in stage.commits()] == list(range(steps))
    if not forgets:
        unkilled = staged(tmp_path_factory.mktemp("unkilled"))
        train(unkilled, unkilled.trainer(trainer=learner_with(teacher)), *range(steps))
        assert digests(stage) == digests(unkilled)


def test_step_of_a_teacher_that_forgets_needs_its_file(tmp_path: Path) -> None:
    stage = staged(tmp_path)
    trainer = stage.trainer(trainer=learner_with(HashTeacher(forgets=True)), checkpoint_every=100)
    train(stage, trainer, 0, 1)
    trainer.close()
    again = stage.trainer(trainer=learner_with(HashTeacher(forgets=True)))
    again.until(lambda: again.idle)
    again.close()
    stage.store.blob("contributions", stage.commits()[1].contributions.sha256).unlink()
    with pytest.raises(
        PolicyError, match="step 1: the log-probs of its teacher are no longer in the store"
    ):
        last = stage.trainer(trainer=learner_with(HashTeacher(forgets=True)))
        last.until(lambda: last.idle)


def test_other_teacher_is_named_when_the_weights_come_out_otherwise(tmp_path: Path) -> None:
    class Other(HashTeacher):
        def name(self) -> str:
            return "other"

        def _of(self, ids: Any) -> float:
            return super()._of(ids) - 1

    stage = staged(tmp_path)
    trainer = stage.trainer(trainer=learner_with(HashTeacher()), checkpoint_every=100)
    train(stage, trainer, 0)
    trainer.close()
    again = stage.trainer(trainer=learner_with(Other()))
    with pytest.raises(ReplayDiverged, match=r"\(other teacher\)"):
        again.until(lambda: again.idle)


def test_trainer_says_what_its_teacher_keeps_it_waiting_for_and_stops_meanwhile(
    tmp_path: Path,
) -> None:
    class Silent(HashTeacher):
        waits_for = ""

        def logprobs(self, rows: Any) -> Any:
            self.waits_for = "the teacher at http://t: 3 of 12 requests open"
            try:
                while True:
                    yield
            finally:
                self.waits_for = ""

    stage = staged(tmp_path)
    trainer = stage.trainer(trainer=learner_with(Silent()))
    stage.take_new(0)
    trainer.until(lambda: trainer.machine.phase == "training")
    trainer.tick(700)
    (wait,) = stage.statuses()[-1].waits
    assert (wait.name, wait.blocking) == ("teacher", True)
    assert wait.description == "batch of step 0: the teacher at http://t: 3 of 12 requests open"
    trainer.runtime._events.append(StopAsked())
    trainer.tick(5)
    assert trainer.machine.finished
    trainer.close()
    assert not stage.commits()
    again = stage.trainer(trainer=learner_with(HashTeacher()))
    again.train_to(1)
