"""Tests of a trainer that is killed, fenced, disconnected and restarted."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_pipe.bus.memory import AppendFault, FaultPlan, MemoryBus
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.commits import decode_history
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.errors import Fenced, NonFinite, OutcomeUnknown
from dora_pipe.schemas.identity import group_id, trajectory_id
from tests.support.bus_steps import ScriptedFaults
from tests.support.trainer_stage import TrainerStage, digests, train, train_killed


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    return stage


@given(st.lists(st.integers(0, 25), max_size=12), st.integers(1, 4))
@settings(max_examples=10)
def test_killed_at_any_tick_the_weights_are_those_of_a_run_that_never_was(
    tmp_path_factory: pytest.TempPathFactory, lives: list[int], checkpoint_every: int
) -> None:
    steps = 4
    stage = TrainerStage(tmp_path_factory.mktemp("killed"))
    stage.start_run()
    train_killed(
        stage, [*lives, 3000], lambda: stage.trainer(checkpoint_every=checkpoint_every), steps=steps
    )
    assert [commit.step for commit in stage.commits()] == list(range(steps))
    unkilled = TrainerStage(tmp_path_factory.mktemp("unkilled"))
    unkilled.start_run()
    train(unkilled, unkilled.trainer(), *range(steps))
    assert digests(stage) == digests(unkilled)


def test_commit_with_a_checkpoint_writes_a_snapshot_if_the_disk_allows_it(
    stage: TrainerStage, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2, 3, 4)
    trainer.close()
    assert decode_history(stage.snapshot.read_bytes()).next_step == 4
    stage.snapshot = stage.snapshot / "below a file"
    again = stage.trainer(checkpoint_every=2)
    train(stage, again, 5)
    again.tick()
    assert len(stage.commits()) == 6
    assert "no snapshot of the commits" in caplog.text


def test_damaged_checkpoint_is_passed_over(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2, 3, 4)
    trainer.close()
    newest = stage.commits()[3].checkpoint
    assert newest is not None
    stage.store.blob("optimizer", newest.sha256).write_bytes(b"damaged")
    older = stage.commits()[1].digest_after
    stage.store.weights_path(older).unlink()  # without both checkpoints: from version 0
    again = stage.trainer(checkpoint_every=2)
    train(stage, again, 5)
    assert len(stage.commits()) == 6


def test_policy_file_that_is_gone_is_made_again_by_the_replay(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=2)
    train(stage, trainer, 0, 1, 2)
    trainer.close()
    last = stage.commits()[-1].digest_after
    stage.store.weights_path(last).unlink()
    again = stage.trainer(checkpoint_every=2)
    again.until(lambda: again.idle)
    assert stage.store.verify(last).digest == last


def test_older_trainer_is_fenced_and_commits_nothing(stage: TrainerStage) -> None:
    older = stage.trainer()
    stage.take_new(0)
    older.until(lambda: older.machine.phase == "publishing")
    newer = stage.trainer()
    with pytest.raises(Fenced):
        older.tick(50)
    newer.train_to(1)
    assert [commit.incarnation for commit in stage.commits()] == [1]


@pytest.mark.parametrize("lands", [0, 1])
def test_commit_of_unknown_outcome_ends_the_role_and_the_next_one_reads_what_happened(
    stage: TrainerStage, lands: int
) -> None:
    class Flaky(FaultPlan):
        def on_append(self, call: int, records: Any) -> AppendFault | None:
            commit = any(b'"step-committed"' in record.value for record in records)
            return AppendFault(kind="unknown", lands=lands) if commit else None

    honest = stage.open_bus
    stage.open_bus = lambda: MemoryBus(
        stage.log, faults=Flaky(), now_ms=lambda: stage.clock.ns // 1_000_000
    )
    trainer = stage.trainer()
    stage.take_new(0)
    with pytest.raises(OutcomeUnknown):
        trainer.tick(200)
    stage.open_bus = honest
    assert len(stage.commits()) == lands
    again = stage.trainer()
    again.train_to(1)
    assert len(stage.commits()) == 1
    train(stage, again, 1)
    assert len(stage.commits()) == 2


def test_commit_rejected_by_the_orchestrator_is_replaced_in_the_history(
    stage: TrainerStage,
) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0)
    stage.commits()
    groups = [stage.log_group(number, version=1, deadline=4) for number in (70, 71)]
    stage.take(1, groups)
    trainer.train_to(2)
    # `fail-batch` was first: the orchestrator decides step 1 again, on other groups.
    fresh = [stage.log_group(number, version=1, deadline=4) for number in (72, 73)]
    stage.take(1, fresh, attempt=2)
    trainer.until(lambda: [commit.attempt for commit in stage.commits()] == [1, 1, 2])
    train(stage, trainer, 2)
    trainer.close()
    history = read_history(stage.bus, stage.topics, stage.clock)
    assert [(note.step, note.attempt) for note in history.notes] == [(0, 1), (1, 2), (2, 1)]
    again = stage.trainer()
    train(stage, again, 3)
    assert stage.commits()[-1].digest_before == stage.commits()[-2].digest_after


def test_step_that_is_not_finite_ends_the_role_and_commits_nothing(stage: TrainerStage) -> None:
    name = trajectory_id(group_id("train", 0), 1)
    trainer = stage.trainer(trainer=SimulatedLearner(poison=[name]))
    stage.take_new(0)
    with pytest.raises(NonFinite, match=name):
        trainer.tick(200)
    assert stage.commits() == []
    # After `fail-batch` the next attempt counts, although the first is earlier in the log.
    trainer.close()
    stage.take(0, [stage.log_group(1), stage.log_group(2)], attempt=2)
    again = stage.trainer(trainer=SimulatedLearner(poison=[name]))
    again.train_to(1)
    assert [commit.attempt for commit in stage.commits()] == [2]


def test_end_of_the_run_ends_the_trainer_also_one_that_starts_after_it(stage: TrainerStage) -> None:
    trainer = stage.trainer()
    train(stage, trainer, 0)
    stage.stop_run()
    trainer.until(lambda: trainer.machine.finished)
    late = stage.trainer()
    late.until(lambda: late.machine.finished)
    assert len(stage.commits()) == 1


def test_log_that_is_away_for_a_while_changes_nothing(stage: TrainerStage, tmp_path: Path) -> None:
    other = TrainerStage(tmp_path / "other")
    other.start_run()
    train(other, other.trainer(), 0, 1, 2)
    stage.open_bus = lambda: MemoryBus(
        stage.log,
        faults=ScriptedFaults(polls=set(range(30, 60)), appends={2: AppendFault(kind="failed")}),
        now_ms=lambda: stage.clock.ns // 1_000_000,
    )
    train(stage, stage.trainer(), 0, 1, 2)
    assert digests(stage) == digests(other)
