"""Manual driver of the trainer's machine."""

from __future__ import annotations

from typing import Any

from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effects import (
    BatchFetched,
    FetchBatch,
    PolicyPublished,
    PublishPolicy,
    Restore,
    Restored,
    StepTrained,
    TrainerEffect,
    TrainStep,
)
from dora_pipe.consumers.trainer.machine import TrainerMachine, TrainerSetup
from dora_pipe.consumers.trainer.status import Gauges
from dora_pipe.core.pure.machine import CaughtUp, Now, Outputs, Published
from dora_pipe.core.pure.records import Record
from dora_pipe.schemas.control import (
    Offender,
    RunStarted,
    TakenGroup,
    TakenTrajectory,
    config_digest,
    decode_control,
)
from dora_pipe.schemas.dead_letter import DeadLetter, decode_dead_letter
from dora_pipe.schemas.metrics import TrainerStatus, decode_metrics
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.schemas.rounds import AnyDecision, Round, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from tests.support.trainer_stage import NO_COST

TOPICS = Topics("r")
NUMERICS = {"torch": "2"}
OFFENDER = Offender(group="g0000000000", trajectory="", reason="C3: overdue")
BLOB = Blob(sha256="b" * 64, bytes=1)
HEARTBEAT_NS = 500


def digest(version: int) -> str:
    return f"{version:064d}"


def run_started(version_0: str = digest(0)) -> RunStarted:
    return RunStarted(
        at_ns=1,
        run="r",
        schema_version=1,
        config={},
        config_digest=config_digest({}),
        dataset_digest="",
        dataset_rows=1,
        eval_digest="",
        eval_rows=0,
        seed=0,
        policy=Manifest(digest=version_0, bytes=0, tensors=()),
        assets_digest="",
        planner="",
        package="",
    )


def batch(step: int, attempt: int = 1, deadline: int = 9) -> TakeBatch:
    taken = TakenTrajectory(
        trajectory=f"g{step:010d}-000",
        attempt=0,
        incarnation=1,
        partition=1,
        offset=40,
        sha256="a" * 64,
    )
    group = TakenGroup(
        group=f"g{step:010d}", version=step, deadline=deadline, trajectories=(taken,)
    )
    settings: dict[str, float | int | str | bool] = {"trainer.learning_rate": 0.5}
    return TakeBatch(reason="", step=step, attempt=attempt, groups=(group,), settings=settings)


class Driver:
    def __init__(self, *, checkpoint_every: int = 2, history: CommitHistory | None = None) -> None:
        self.history = history or CommitHistory(run_started=run_started(), incarnation=4)
        setup = TrainerSetup(
            topics=TOPICS,
            incarnation=5,
            checkpoint_every=checkpoint_every,
            heartbeat_ns=HEARTBEAT_NS,
        )
        self.machine = TrainerMachine(
            setup, self.history, cost=lambda: NO_COST, cached=lambda: self.gauges
        )
        self.gauges = Gauges(3, 4)
        self.now_ns = 0
        self.offset = 100
        self.written: list[Any] = []
        self.dead_letters: list[DeadLetter] = []
        self.statuses: list[TrainerStatus] = []

    def react(self, *inputs: Any, after_ns: int = 1) -> list[Any]:
        self.now_ns += after_ns
        outputs = self.machine.react(inputs, Now(mono_ns=self.now_ns, wall_ns=self.now_ns + 7))
        self._read(outputs)
        return outputs.effects

    def _read(self, outputs: Outputs[TrainerEffect]) -> None:
        for entry in outputs.publish:
            record = entry.record
            if record.topic == TOPICS.control:
                self.written.append(decode_control(record.value))
            elif record.topic == TOPICS.metrics:
                status = decode_metrics(record.value)
                assert isinstance(status, TrainerStatus)
                self.statuses.append(status)
            else:
                assert record.topic == TOPICS.dead_letters
                self.dead_letters.append(decode_dead_letter(record.value, record.headers))

    def decide(self, *decisions: AnyDecision) -> list[Any]:
        self.offset += 10
        ordinal = self.offset // 10
        value = encode(
            Round(ordinal=ordinal, incarnation=0, now_ns=0, control_next=0, decisions=decisions)
        )
        return self.react(
            Record(topic=TOPICS.decisions, partition=0, offset=self.offset, key=b"", value=value)
        )

    def to_idle(self) -> Driver:
        effects = self.react()
        assert isinstance(effects[0], Restore)
        self.react(CaughtUp())
        self.restored()
        return self

    def restored(self) -> list[Any]:
        step = self.history.next_step
        return self.react(
            Restored(step=step, digest=self.history.digest_of(step), numerics=NUMERICS)
        )

    def to_reading(self, step: int = 0) -> Driver:
        self.to_idle()
        assert isinstance(self.decide(batch(step))[0], FetchBatch)
        return self

    def to_training(self, step: int = 0) -> Driver:
        self.to_reading(step)
        assert isinstance(self.fetched(step)[0], TrainStep)
        return self

    def to_publishing(self, step: int = 0) -> Driver:
        self.to_training(step)
        assert isinstance(self.trained(step)[0], PublishPolicy)
        return self

    def to_committing(self, step: int = 0) -> Driver:
        self.to_publishing(step)
        self.published(step)
        return self

    def fetched(self, step: int = 0, *offenders: Offender, attempt: int = 1) -> list[Any]:
        return self.react(BatchFetched(step=step, attempt=attempt, offenders=offenders))

    def trained(self, step: int = 0, attempt: int = 1) -> list[Any]:
        return self.react(
            StepTrained(step=step, attempt=attempt, metrics={"loss": 0.5}, compute_s=1.5)
        )

    def published(self, step: int = 0, attempt: int = 1) -> list[Any]:
        return self.react(
            PolicyPublished(
                step=step,
                attempt=attempt,
                manifest=Manifest(digest=digest(step + 1), bytes=0, tensors=()),
                contributions=BLOB,
                checkpoint=None,
            )
        )

    def acknowledged(self, tag: str = "committed", offset: int = 900) -> list[Any]:
        return self.react(Published(tag=tag, topic=TOPICS.control, partition=0, offset=offset))

    def step(self, step: int) -> None:
        if self.phase == "idle":
            self.decide(batch(step))
        self.fetched(step)
        self.trained(step)
        self.published(step)
        self.acknowledged()

    @property
    def phase(self) -> str:
        return self.machine.phase
