"""Tests of retraining from the log."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import PACKING
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.recovery import read_commits, read_history
from dora_pipe.consumers.trainer.replay_steps import load_base, replay_steps
from dora_pipe.core.errors import InvariantBroken, LogTruncated, ReplayDiverged
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import StepCommitted, WeightsAdopted
from dora_pipe.schemas.wire import encode
from tests.support.trainer_stage import TrainerStage, digests, train


@pytest.fixture
def stage(tmp_path: Path) -> TrainerStage:
    stage = TrainerStage(tmp_path)
    stage.start_run()
    return stage


def test_replay_that_diverges_names_step_tensor_and_numerics(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0, 1)
    trainer.close()
    again = stage.trainer(trainer=SimulatedLearner(flavour="another machine"))
    with pytest.raises(ReplayDiverged, match=r"step 0 .* tensor weights differs") as caught:
        again.tick(200)
    assert "--adopt" in str(caught.value.hint)
    assert "numerics are the same" in caught.value.message


def test_adopt_takes_the_committed_weights_and_logs_that_it_did(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0, 1)
    trainer.close()
    committed = digests(stage)
    again = stage.trainer(
        trainer=SimulatedLearner(flavour="another machine"), adopt=True, checkpoint_every=100
    )
    train(stage, again, 2, 3)
    adopted = [event for event in stage.control() if isinstance(event, WeightsAdopted)]
    assert [commit.step for commit in adopted] == [0, 1]
    assert [commit.digest_committed for commit in adopted] == committed
    first, second = stage.commits()[2:]
    assert first.adopted and not second.adopted
    assert first.digest_before == committed[1]
    assert first.checkpoint is not None  # no trainer has to adopt these steps again
    assert second.checkpoint is None
    again.close()
    third = stage.trainer(trainer=SimulatedLearner(flavour="another machine"))
    train(stage, third, 4)
    assert not stage.commits()[4].adopted


def test_committed_trajectory_that_was_changed_stops_the_replay(stage: TrainerStage) -> None:
    trainer = stage.trainer(checkpoint_every=100)
    train(stage, trainer, 0)
    trainer.close()
    commit = stage.commits()[0]
    taken = commit.groups[0].trajectories[0]
    stage.change_trajectory(taken.partition, taken.offset)
    again = stage.trainer()
    with pytest.raises(InvariantBroken, match="step 0: trajectory g"):
        again.tick(200)


def commits_of(stage: TrainerStage) -> list[StepCommitted]:
    history = read_history(stage.bus, stage.topics, stage.clock)
    return list(read_commits(stage.bus, stage.topics, history.notes, stage.clock))


def replayed(
    stage: TrainerStage, commits: list[StepCommitted], first: int, trainer: Any = None
) -> list[Any]:
    history = read_history(stage.bus, stage.topics, stage.clock)
    trainer = trainer or SimulatedLearner()
    assert history.run_started is not None
    base = load_base(stage.store, trainer, history.run_started, history.notes[:first])
    assert base <= first
    log, run = (stage.bus, stage.topics), (stage.store, history)
    steps = replay_steps(*log, *run, trainer, commits[base:], clock=stage.clock)
    return [step for step in steps if step.step >= first]


class Packs(SimulatedLearner):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.told = way, [""]

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        rest = dict(settings)
        self.told.append(str(rest.pop(PACKING, "")))
        return super().train(batch, rest)

    def numerics(self) -> dict[str, str]:
        return super().numerics() | {"packing": self.way}


@pytest.mark.parametrize(
    ("way", "here", "other"),
    [("on", "varlen", []), ("varlen", "varlen", []), ("varlen", "on", ["packing"])],
)
def test_packed_step_is_replayed_the_way_that_its_commit_names(
    stage: TrainerStage, way: str, here: str, other: list[str]
) -> None:
    train(stage, stage.trainer(trainer=Packs(way), checkpoint_every=100), 0)
    learner = Packs(here)
    (step,) = replayed(stage, commits_of(stage), first=0, trainer=learner)
    assert learner.told[-1] == way
    assert (step.equal, step.other_numerics) == (True, other)


def test_commit_that_is_gone_is_noticed(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), 0)
    history = read_history(stage.bus, stage.topics, stage.clock)
    note = replace(history.notes[0], offset=history.notes[0].offset + 1)
    with pytest.raises((LogTruncated, InvariantBroken)):
        list(read_commits(stage.bus, stage.topics, [note], stage.clock))


def test_doubled_commit_counts_once(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), 0, 1)
    stage.writer.append([Append(topic=stage.topics.control, value=encode(stage.commits()[0]))])
    stage.writer.append([Append(topic=stage.topics.control, value=encode(stage.commits()[1]))])
    history = read_history(stage.bus, stage.topics, stage.clock)
    assert [note.step for note in history.notes] == [0, 1]


def test_replay_reads_from_the_smallest_offset_that_its_steps_took(stage: TrainerStage) -> None:
    train(stage, stage.trainer(), *range(6))
    history = read_history(stage.bus, stage.topics, stage.clock)
    offsets: dict[int, int] = {}
    for commit in commits_of(stage)[3:]:
        for taken in (trajectory for group in commit.groups for trajectory in group.trajectories):
            offsets[taken.partition] = min(taken.offset, offsets.get(taken.partition, 1 << 60))
    assert history.starts_from(3) == offsets
    assert max(offsets.values()) > 0
