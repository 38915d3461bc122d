"""The judge of the kill rounds: a sound run is clean, and each thing that may be wrong is seen."""

from __future__ import annotations

import msgspec
import pytest

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus
from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.pure.records import Append
from dora_pipe.schemas.control import RequestFailed
from dora_pipe.schemas.rounds import Fence, Round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode, sha256_hex
from tests.support import damage
from tests.support import orchestrator_records as records
from tests.support.kill_rounds.inject import Ack
from tests.support.kill_rounds.judge import Verdict, count_twice, judge, others_lost, read_evidence
from tests.support.recorded_run import STEPS, RecordedRun
from tests.support.tamper import Tamper
from tests.support.worker import VirtualClock

pytestmark = [pytest.mark.slow, pytest.mark.pure]


class Forgetful(SimulatedLearner):
    def train(self, batch: TrainBatch, settings: Settings) -> StepResult:
        if batch.step != STEPS - 1:
            return super().train(batch, settings)
        return super().train(TrainBatch(step=batch.step, groups=batch.groups[1:]), settings)


def _acks(run: RecordedRun) -> list[Ack]:
    bus = run.open()
    try:
        return [
            Ack(0, 1, record.topic, record.partition, record.offset, sha256_hex(record.value))
            for topic in run.topics.all()
            for record in records_of(bus, ends_of(bus, topic))
        ]
    finally:
        bus.close()


def _judge(
    run: RecordedRun, acks: list[Ack], *, trainer: SimulatedLearner | None = None
) -> Verdict:
    bus = run.open()
    try:
        trainer = trainer or SimulatedLearner()
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


def test_an_acknowledged_record_that_is_gone_is_lost(
    copy: RecordedRun, recorded: RecordedRun
) -> None:
    acks = _acks(recorded)
    with Tamper(copy) as log:
        damage.remove_trajectory(log)
    verdict = _judge(copy, [ack for ack in acks if ack.topic != copy.topics.decisions])
    assert verdict.lost == 1
    assert verdict.violations
    assert not verdict.clean


def test_an_acknowledged_record_with_other_bytes_is_lost(recorded: RecordedRun) -> None:
    first, *rest = _acks(recorded)
    verdict = _judge(recorded, [msgspec.structs.replace(first, sha256="0" * 64), *rest])
    assert (verdict.lost, verdict.clean) == (1, False)


def test_a_doubled_commit_is_trained_twice(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        damage.double_step(log)
    bus = copy.open()
    commits = read_evidence(bus, copy.topics).commits
    bus.close()
    doubled = next(commit for commit in commits if commits.count(commit) == 2)
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


def test_what_a_dead_role_costs_others_is_named_and_what_it_costs_itself_is_not() -> None:
    bus, topics = MemoryBus(), Topics("tiny")
    bus.create([TopicSpec(name=name) for name in topics.all()])
    facts = [
        records.role_started("trainer", 0),
        records.joined("w0"),
        records.joined("w1"),
        records.role_started("trainer", 1),
        records.joined("w1"),
        RequestFailed(
            at_ns=0,
            worker="w0",
            incarnation=2,
            trajectory="g0-000",
            attempt=1,
            error="E",
            message="",
            retryable=True,
        ),
    ]
    fences = tuple(Fence(reason="lease", worker=name, incarnation=0) for name in ("w0", "w1"))
    round_ = Round(ordinal=0, incarnation=0, now_ns=0, control_next=0, decisions=fences)
    writer = bus.writer()
    writer.append([Append(topic=topics.control, value=encode(fact)) for fact in facts])
    writer.append([Append(topic=topics.decisions, value=encode(round_))])
    w0, w1, trainer = ["g0-000 failed on w0"], ["w1 began again"], ["trainer began again"]
    assert others_lost(bus, topics, "w0") == [*trainer, *w1, "w1 was fenced"]
    assert others_lost(bus, topics, "w1") == [*w0, *trainer, "w0 was fenced"]
    assert others_lost(bus, topics, "trainer") == [*w0, *w1, "w0 was fenced", "w1 was fenced"]
