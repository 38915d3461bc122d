"""The judge of the kill rounds: a sound run is clean, and each thing that may be wrong is seen."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from dora_pipe.bench.faults.inject import Ack
from dora_pipe.bench.faults.judge import Verdict, count_twice, judge, read_evidence
from dora_pipe.consumers.trainers.port import Settings, StepResult, TrainBatch
from dora_pipe.consumers.trainers.simulated import SimulatedTrainer
from dora_pipe.history.reading import ends_of, records_of
from dora_pipe.schemas.wire import sha256_hex
from tests.support import damage
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.tamper import Tamper
from tests.support.worker import VirtualClock


class Forgetful(SimulatedTrainer):
    """It leaves a trajectory out of one step."""

    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        if batch.step != STEPS - 1:
            return super().train(batch, settings)
        return super().train(TrainBatch(step=batch.step, groups=batch.groups[1:]), settings)


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


def _acks(run: RecordedRun) -> list[Ack]:
    """A book in which every record of the log was acknowledged."""
    bus = run.open()
    try:
        return [
            Ack(0, 1, one.topic, one.partition, one.offset, sha256_hex(one.value))
            for topic in run.topics.all()
            for one in records_of(bus, ends_of(bus, topic))
        ]
    finally:
        bus.close()


def _judge(
    run: RecordedRun, acks: list[Ack], *, trainer: SimulatedTrainer | None = None
) -> Verdict:
    bus = run.open()
    try:
        trainer = trainer or SimulatedTrainer()
        return judge(bus, run.topics, run.store, acks, trainer, clock=VirtualClock())
    finally:
        bus.close()


def test_a_sound_run_is_clean(recorded: RecordedRun) -> None:
    acks = _acks(recorded)
    verdict = _judge(recorded, acks)
    assert verdict.clean, verdict
    assert verdict.acknowledged == len(acks) > 100
    assert (verdict.steps, verdict.equal) == (STEPS, STEPS)


def test_nothing_acknowledged_proves_nothing(recorded: RecordedRun) -> None:
    assert not _judge(recorded, []).clean


def test_an_acknowledged_record_that_is_gone_is_lost(recorded: RecordedRun, tmp_path: Path) -> None:
    acks = _acks(recorded)
    copy = recorded.copy(tmp_path / "copy")
    with Tamper(copy) as log:
        damage.remove_trajectory(log)
    verdict = _judge(copy, [one for one in acks if one.topic != copy.topics.decisions])
    assert verdict.lost == 1
    assert verdict.violations
    assert not verdict.clean


def test_an_acknowledged_record_with_other_bytes_is_lost(recorded: RecordedRun) -> None:
    first, *others = _acks(recorded)
    verdict = _judge(recorded, [msgspec.structs.replace(first, sha256="0" * 64), *others])
    assert (verdict.lost, verdict.clean) == (1, False)


def test_a_doubled_commit_is_trained_twice(recorded: RecordedRun, tmp_path: Path) -> None:
    copy = recorded.copy(tmp_path / "copy")
    with Tamper(copy) as log:
        damage.double_step(log)
    bus = copy.open()
    commits = read_evidence(bus, copy.topics).commits
    bus.close()
    doubled = next(one for one in commits if commits.count(one) == 2)
    names = 1 + len(doubled.groups) + sum(len(group.trajectories) for group in doubled.groups)
    assert count_twice(commits) == names
    verdict = _judge(copy, _acks(copy))
    assert verdict.trained_twice == names
    assert not verdict.clean


def test_weights_that_come_out_otherwise_are_not_equal(recorded: RecordedRun) -> None:
    verdict = _judge(recorded, _acks(recorded), trainer=Forgetful())
    assert verdict.equal == STEPS - 1
    assert not verdict.weights_equal
    assert not verdict.clean
    assert not verdict.violations


def test_weights_that_never_moved_prove_nothing(recorded: RecordedRun) -> None:
    verdict = _judge(recorded, _acks(recorded))
    assert verdict.moved
    assert not msgspec.structs.replace(verdict, moved=False).weights_equal
    assert not msgspec.structs.replace(verdict, finished=False).clean
    assert not msgspec.structs.replace(verdict, steps=STEPS - 1).clean
