"""Stage for the trainer: memory log, handwritten orchestrator and workers.

One thread, virtual clock, inline trainer work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.bus.base import records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.config.model import Config, Model, Run, Task
from dora_pipe.config.outside import Store
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.simulated import SimulatedLearner, initial_weights
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers, HandlersSetup
from dora_pipe.consumers.trainer.machine import TrainerMachine, TrainerSetup
from dora_pipe.consumers.trainer.ports import InlinePort
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.schemas.control import (
    AnyControl,
    RunStarted,
    StepCommitted,
    TakenGroup,
    TakenTrajectory,
    decode_control,
)
from dora_pipe.schemas.headers import header_pairs
from dora_pipe.schemas.identity import group_id, trajectory_id
from dora_pipe.schemas.metrics import Cost, TrainerStatus, decode_metrics
from dora_pipe.schemas.rounds import AnyDecision, Round, StopRun, TakeBatch
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_trajectory
from dora_pipe.schemas.wire import Unknown, encode
from dora_pipe.store.store import PolicyStore
from tests.support.batches import SETTINGS, make_trajectory
from tests.support.orchestrator_records import role_started, run_started
from tests.support.worker import VirtualClock

RUN = "r"
PARTITIONS = 2
WORKER_INCARNATION = 7
NO_COST = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)


class TrainerStage:
    """Log of a run with all roles except the trainer."""

    def __init__(self, root: Path, open_bus: Callable[[], Bus] | None = None) -> None:
        self.log = MemoryLog()
        self.clock = VirtualClock(1_000_000_000)
        self.topics = Topics(RUN)
        self.store = PolicyStore(root / "policies")
        self.snapshot = root / "commits"
        self.open_bus = open_bus or self.open_memory
        self.bus = self.open_bus()
        many = {self.topics.trajectories, self.topics.progress}
        self.bus.create(
            [
                TopicSpec(name=name, partitions=PARTITIONS if name in many else 1)
                for name in self.topics.all()
            ]
        )
        self.writer = self.bus.writer()
        self.policy = self.store.publish_weights(initial_weights)
        self.digests = {0: self.policy.digest}
        self.settings: dict[str, Any] = {}
        """Extra settings of the next batches."""
        self.rounds = 0

    def open_memory(self) -> Bus:
        return MemoryBus(self.log, now_ms=lambda: self.clock.ns // 1_000_000)

    # Other roles

    def start_run(self, **trainer: Any) -> RunStarted:
        (self.store.assets_path("assets")).mkdir(parents=True)
        config = Config(
            run=Run(name=RUN, steps=100),
            model=Model(path="m"),
            task=Task(kind="arithmetic"),
            store=Store(keep_every=0),
        )
        config = msgspec.structs.replace(
            config, trainer=msgspec.structs.replace(config.trainer, **trainer)
        )
        started = msgspec.structs.replace(
            run_started(config), policy=self.policy, assets_digest="assets"
        )
        self.append(self.topics.control, started)
        return started

    def append(self, topic: str, record: msgspec.Struct) -> int:
        return self.writer.append([Append(topic=topic, value=encode(record))])[0]

    def log_trajectory(
        self, trajectory: Trajectory, /, partition: int | None = None, **header_changes: Any
    ) -> TakenTrajectory:
        """Append a trajectory with changed headers; return its entry for a batch decision."""
        value, headers = encode_trajectory(trajectory)
        headers = msgspec.structs.replace(headers, **header_changes)
        ordinal = int(trajectory.trajectory[1:11])
        where = ordinal % PARTITIONS if partition is None else partition
        (offset,) = self.writer.append(
            [
                Append(
                    topic=self.topics.trajectories,
                    partition=where,
                    key=headers.group.encode(),
                    value=value,
                    headers=header_pairs(headers),
                )
            ]
        )
        return TakenTrajectory(
            trajectory=trajectory.trajectory,
            attempt=headers.attempt,
            incarnation=headers.incarnation,
            partition=where,
            offset=offset,
            sha256=headers.sha256,
        )

    def log_group(
        self, ordinal: int, *, version: int = 0, deadline: int = 9, size: int = 2, **changes: Any
    ) -> TakenGroup:
        group = group_id("train", ordinal)
        taken = [
            self.log_trajectory(
                make_trajectory(
                    trajectory_id(group, sample),
                    run=RUN,
                    version=version,
                    digest=self.digests[version],
                    deadline=deadline,
                    incarnation=WORKER_INCARNATION,
                    group_size=size,
                    reward=float(sample),
                    sampled=[10 + ordinal % 50, 11 + sample, 2],
                    **changes,
                )
            )
            for sample in range(size)
        ]
        return TakenGroup(
            group=group, version=version, deadline=deadline, trajectories=tuple(taken)
        )

    def decide(self, *decisions: AnyDecision) -> int:
        record = Round(
            ordinal=self.rounds, incarnation=0, now_ns=1, control_next=0, decisions=decisions
        )
        self.rounds += 1
        return self.append(self.topics.decisions, record)

    def take(
        self, step: int, groups: Sequence[TakenGroup], attempt: int = 1, pins: tuple[int, ...] = ()
    ) -> TakeBatch:
        decision = TakeBatch(
            reason="test",
            step=step,
            attempt=attempt,
            groups=tuple(groups),
            settings={**SETTINGS, **self.settings},
            pins=pins,
        )
        self.decide(decision)
        return decision

    def take_new(
        self, step: int, version: int | None = None, groups: int = 2, pins: tuple[int, ...] = ()
    ) -> TakeBatch:
        """Log groups of a version (default: the step's) and decide their batch."""
        position = step if version is None else version
        logged = [
            self.log_group(step * 100 + number, version=position, deadline=step + 2)
            for number in range(groups)
        ]
        return self.take(step, logged, pins=pins)

    def stop_run(self) -> None:
        self.decide(StopRun(reason="test"))

    # Contents of the log

    def records(self, topic: str, partition: int = 0) -> list[Record]:
        position = TopicPartition(topic, partition)
        return list(records_of(self.bus, {position: self.bus.end(position)}))

    def control(self) -> list[AnyControl]:
        decoded = [decode_control(record.value) for record in self.records(self.topics.control)]
        return [record for record in decoded if not isinstance(record, Unknown)]

    def commits(self) -> list[StepCommitted]:
        commits = [event for event in self.control() if isinstance(event, StepCommitted)]
        self.digests |= {commit.step + 1: commit.digest_after for commit in commits}
        return commits

    def statuses(self) -> list[TrainerStatus]:
        decoded = [decode_metrics(record.value) for record in self.records(self.topics.metrics)]
        return [status for status in decoded if isinstance(status, TrainerStatus)]

    def read_history(self, bus: Bus) -> CommitHistory:
        """Return the history, which is the same with a snapshot and without."""
        history = read_history(bus, self.topics, self.clock, self.snapshot)
        assert history == read_history(bus, self.topics, self.clock)
        return history

    def change_trajectory(self, partition: int, offset: int) -> None:
        held = self.log._partitions[TopicPartition(self.topics.trajectories, partition)]
        location = held.offsets.index(offset)
        trajectory = decode_trajectory(held.records[location].value)
        token_ids = [*trajectory.token_ids]
        token_ids[-2] += 1
        value, headers = encode_trajectory(replace(trajectory, token_ids=token_ids))
        held.records[location] = replace(
            held.records[location], value=value, headers=header_pairs(headers)
        )

    def trainer(self, **options: Any) -> StagedTrainer:
        return StagedTrainer(self, **options)


class StagedTrainer:
    def __init__(
        self,
        stage: TrainerStage,
        *,
        trainer: Learner | None = None,
        adopt: bool = False,
        checkpoint_every: int = 2,
        keep_every: int = 0,
        cost: Callable[[], Cost] = lambda: NO_COST,
        **bounds: Any,
    ) -> None:
        self.stage = stage
        bus = stage.open_bus()
        self.bus = bus
        writer = bus.writer(exclusive=f"{RUN}.trainer")
        history = stage.read_history(bus)
        assert history.run_started is not None
        incarnation = history.incarnation + 1
        started = role_started("trainer", incarnation)
        writer.append([Append(topic=stage.topics.control, value=encode(started))])
        meter = Meter()
        self.handlers = EffectHandlers(
            HandlersSetup(
                topics=stage.topics,
                started=history.run_started,
                starts=dict(history.starts),
                adopt=adopt,
                snapshot=stage.snapshot,
                **bounds,
            ),
            bus=bus,
            store=stage.store,
            make_learner=lambda: trainer or SimulatedLearner(),
            clock=stage.clock,
            meter=meter,
        )
        self.port = InlinePort(self.handlers)
        self.machine = TrainerMachine(
            TrainerSetup(
                topics=stage.topics,
                incarnation=incarnation,
                checkpoint_every=checkpoint_every,
                keep_every=keep_every,
                heartbeat_ns=500_000_000,
            ),
            history,
            cost=cost,
            cached=self.port.cached,
        )
        self.runtime = Runtime(
            self.machine,
            bus=bus,
            writer=writer,
            port=self.port,
            clock=stage.clock,
            meter=meter,
            exclusive=True,
            status=bus.writer(),
            turn_ns=0,
        )

    def tick(self, count: int = 1) -> None:
        for _ in range(count):
            self.stage.clock.sleep(0.01)
            self.runtime.tick()

    def until(self, done: Callable[[], bool], ticks_max: int = 2000) -> None:
        for _ in range(ticks_max):
            if done():
                return
            self.tick()
        raise AssertionError(f"not done after {ticks_max} ticks, phase {self.machine.phase}")

    def train_to(self, step: int) -> None:
        self.until(lambda: self.machine.history.next_step == step and self.idle)

    @property
    def idle(self) -> bool:
        return self.machine.phase == "idle"

    def close(self) -> None:
        self.runtime.close()
        self.bus.close()


def train(stage: TrainerStage, trainer: StagedTrainer, *steps: int) -> None:
    for step in steps:
        stage.commits()
        stage.take_new(step)
        trainer.train_to(step + 1)


def train_killed(
    stage: TrainerStage, lives: Sequence[int], make: Callable[[], StagedTrainer], *, steps: int
) -> None:
    """Train steps with trainers killed after given ticks; files and log survive."""
    taken = 0
    for life in lives:
        trainer = make()
        for _ in range(life):
            done = trainer.machine.history.next_step
            if done == taken < steps:
                stage.commits()
                stage.take_new(taken)
                taken += 1
            if done == steps:
                break
            trainer.tick()
        trainer.close()


def digests(stage: TrainerStage) -> list[str]:
    return [commit.digest_after for commit in stage.commits()]
