"""Worker in virtual time: real machine, loop, ports and codec on a memory log; the test is the
orchestrator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus, TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.producers.engines.engine import Engine, SamplingParams
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine, long_tailed_length
from dora_pipe.producers.tasks.calls import AgentCall
from dora_pipe.producers.worker.effects import OpenSession, WorkerEffect
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import Handover, MemoryHandover
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.ports import HandoverPort, RecordPort, TaskPort, WorkerPorts
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.schemas.control import (
    AnyControl,
    Resume,
    TrajectoryLogged,
    decode_control,
)
from dora_pipe.schemas.identity import Purpose, group_id, group_seed, partition_of, trajectory_id
from dora_pipe.schemas.metrics import WorkerStatus, decode_metrics, merged
from dora_pipe.schemas.policy import Blob
from dora_pipe.schemas.rounds import (
    AnyDecision,
    Assign,
    Cancel,
    GroupSpec,
    Migrate,
    Round,
    ScheduledRequest,
)
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import decode_trajectory
from dora_pipe.schemas.wire import Unknown, encode
from dora_pipe.sim.parts import Numbers
from tests.support.agents import AgentsPort
from tests.support.inline_tasks import InlineTasks
from tests.support.orchestrator_records import joined
from tests.support.singly import as_decision, singly

TOPICS = Topics("r")
PARTITIONS = 2
DATASET = "d" * 64
EVAL_DATASET = "e" * 64
OF_AGENTS = {"agents": frozenset({"train"}), "max_turns": {"train": 64}}
"""Worker settings for agents."""
TICK_NS = 5_000_000
HEARTBEAT_NS = 500_000_000
T = TypeVar("T")


def digest_of(version: int) -> str:
    return f"{version:064x}"


@dataclass
class VirtualClock:
    ns: int = 0

    def now_ns(self) -> int:
        return self.ns

    def wall_ns(self) -> int:
        return 10**18 + self.ns

    def sleep(self, seconds: float) -> None:
        self.ns += int(seconds * 1e9)


def spec_of(
    ordinal: int, version: int = 0, purpose: Purpose = "train", digest: str = ""
) -> GroupSpec:
    return GroupSpec(
        group=group_id(purpose, ordinal),
        ordinal=ordinal,
        purpose=purpose,
        version=version,
        digest=digest or digest_of(version),
        deadline=-1 if purpose == "eval" else version + 2,
        partition=partition_of(ordinal, PARTITIONS),
        dataset_digest=DATASET if purpose == "train" else EVAL_DATASET,
        index=ordinal,
        data_epoch=0,
        seed=group_seed(1, purpose, ordinal),
        size=8,
    )


def setup_of(incarnation: int, decisions_from: int = 0, **changes: Any) -> WorkerSetup:
    params = SamplingParams(max_tokens=changes.pop("max_tokens", 64), stop_ids=(END_TOKEN,))
    settings: dict[str, Any] = {
        "topics": TOPICS,
        "worker": "w0",
        "incarnation": incarnation,
        "slots": 4,
        "prefetch": 2,
        "context_tokens": 512,
        "checkpoint_tokens": 16,
        "max_turns": {"train": 4, "eval": 4},
        "heartbeat_ns": HEARTBEAT_NS,
        "stop_timeout_ns": 30_000_000_000,
        "decisions_from": decisions_from,
        "digests": {"train": DATASET, "eval": EVAL_DATASET},
        "params": {"train": params, "eval": params},
    }
    return WorkerSetup(**(settings | changes))


class PortsOfAgents(WorkerPorts):
    """Ports of a worker whose agents are called by the port of its sessions."""

    def start(self, effect: WorkerEffect) -> None:
        if isinstance(effect, AgentCall):
            self._of[OpenSession].start(effect)
        else:
            super().start(effect)


class Worker:
    def __init__(
        self, world: World, setup: WorkerSetup, tasks: InlineTasks, agents: AgentsPort | None = None
    ) -> None:
        self.tasks = tasks
        self.agents = agents
        self.meter = Meter()
        self.setup = setup
        self.machine = WorkerMachine(
            setup,
            cost=self.meter.cost,
            kv_used=lambda: self.engine.kv_used_tokens,
            prompt_tokens=lambda: self.engine.prompt_tokens,
        )
        self.engine = world.engine(setup)
        clock = world.clock
        self.runtime = Runtime(
            self.machine,
            bus=world.bus,
            writer=world.bus.writer(),
            port=(WorkerPorts if agents is None else PortsOfAgents)(
                tasks=TaskPort(tasks, Numbers()),
                sessions=agents,
                records=RecordPort(world.bus, TOPICS, self.meter, clock=clock, in_thread=False),
                handover=HandoverPort(world.handover, in_thread=world.handover_thread),
                engine=EnginePort(
                    self.engine,
                    world.weights_path,
                    clock=clock,
                    in_thread=False,
                    steps_max=world.steps_max,
                ),
            ),
            clock=clock,
            meter=self.meter,
            exclusive=False,
            turn_ns=0,
            background=world.background,
        )

    @property
    def counts(self) -> Counter[str]:
        return self.machine.requests.counts


class ScriptedLog:
    """Log of a run in which a test decides."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        partitions = {TOPICS.trajectories: PARTITIONS, TOPICS.progress: PARTITIONS}
        bus.create(
            [TopicSpec(name=name, partitions=partitions.get(name, 1)) for name in TOPICS.all()]
        )
        self.writer = bus.writer()
        self.rounds = 0

    def append(self, topic: str, record: msgspec.Struct) -> int:
        return self.writer.append([Append(topic=topic, value=encode(record))])[0]

    def decide(self, *decisions: AnyDecision | ScheduledRequest, incarnation: int = 1) -> None:
        record = Round(
            ordinal=self.rounds,
            incarnation=incarnation,
            now_ns=0,
            control_next=0,
            decisions=tuple(map(as_decision, decisions)),
        )
        self.rounds += 1
        self.append(TOPICS.decisions, record)

    def records(self, topic: str) -> list[Record]:
        return list(records_of(self.bus, ends_of(self.bus, topic)))

    def control(self) -> list[AnyControl | Unknown]:
        return [decode_control(record.value) for record in self.records(TOPICS.control)]

    def facts(self, kind: type[T]) -> list[T]:
        return [record for record in singly(self.control()) if isinstance(record, kind)]

    def trajectory(self, logged: TrajectoryLogged) -> Trajectory:
        for record in self.records(TOPICS.trajectories):
            if (record.partition, record.offset) == (logged.partition, logged.offset):
                return decode_trajectory(record.value)
        raise AssertionError(f"nothing lies at {logged.partition}/{logged.offset}")


class World(ScriptedLog):
    def __init__(
        self,
        *,
        lengths: Callable[[int, int], int] = long_tailed_length,
        bus: Bus | None = None,
        steps_max: int = 1,
        policies: Mapping[int, str] | None = None,
        engine: Callable[[WorkerSetup], Engine] | None = None,
        weights_path: Callable[[str], Path] = Path,
        handover: Handover | None = None,
        handover_thread: bool = False,
        background: bool = False,
    ) -> None:
        self.handover_thread = handover_thread
        self.background = background
        self.clock = VirtualClock()
        self.policies = policies or {}
        self.weights_path = weights_path
        self._engine = engine
        self.lengths = lengths
        self.steps_max = steps_max
        super().__init__(bus or MemoryBus(MemoryLog(), now_ms=lambda: self.clock.ns // 1_000_000))
        self.handover = handover or MemoryHandover()
        self.stopping: set[int] = set()

    def engine(self, setup: WorkerSetup) -> Engine:
        if self._engine is not None:
            return self._engine(setup)
        return SimulatedEngine(
            slots=setup.slots,
            context_tokens=setup.context_tokens,
            max_resident_versions=setup.max_resident_versions,
            lengths=self.lengths,
            clock=self.clock,
        )

    def digest(self, version: int) -> str:
        return self.policies.get(version) or digest_of(version)

    def join(
        self, *, tasks: InlineTasks | None = None, agents: AgentsPort | None = None, **changes: Any
    ) -> Worker:
        decisions_from = self.bus.end(TopicPartition(TOPICS.decisions, 0))
        event = joined(changes.get("worker", "w0"), prefetch=2)
        incarnation = self.append(TOPICS.control, event)
        if agents is not None:
            changes = {**OF_AGENTS, **changes}
        setup = setup_of(incarnation, decisions_from, **changes)
        return Worker(self, setup, tasks or InlineTasks(), agents)

    def assign(self, worker: Worker, version: int, *drop: int) -> Assign:
        return Assign(
            reason="t",
            worker=worker.setup.worker,
            incarnation=worker.setup.incarnation,
            version=version,
            digest=self.digest(version),
            drop=drop,
        )

    def place(
        self,
        worker: Worker,
        ordinal: int,
        sample: int = 0,
        *,
        version: int = 0,
        attempt: int = 1,
        resume: Resume | None = None,
        kv: Blob | None = None,
        purpose: Purpose = "train",
    ) -> ScheduledRequest:
        return ScheduledRequest(
            reason="t",
            spec=spec_of(ordinal, version, purpose, self.digest(version)),
            trajectory=trajectory_id(group_id(purpose, ordinal), sample),
            sample=sample,
            attempt=attempt,
            worker=worker.setup.worker,
            incarnation=worker.setup.incarnation,
            resume=resume,
            kv=kv,
        )

    def move(self, request: ScheduledRequest, to: Worker) -> Migrate:
        return Migrate(
            reason="t",
            trajectory=request.trajectory,
            attempt=request.attempt,
            worker=request.worker,
            incarnation=request.incarnation,
            to=to.setup.worker,
            to_incarnation=to.setup.incarnation,
        )

    def cancel(self, request: ScheduledRequest) -> Cancel:
        return Cancel(
            reason="t",
            trajectory=request.trajectory,
            attempt=request.attempt,
            worker=request.worker,
            incarnation=request.incarnation,
        )

    def start(self, version: int = 0, **changes: Any) -> Worker:
        worker = self.join(**changes)
        self.decide(self.assign(worker, version))
        self.until(worker, lambda: worker.machine.served.version == version)
        return worker

    def ticks(self, worker: Worker, count: int) -> None:
        for _ in range(count):
            if worker.machine.finished:
                return
            worker.runtime.tick()
            self.clock.ns += TICK_NS

    def until(self, worker: Worker, done: Callable[[], bool], ticks_max: int = 20_000) -> None:
        for _ in range(ticks_max):
            if done():
                return
            self.ticks(worker, 1)
        raise AssertionError(
            f"not within {ticks_max} ticks; it waits for: "
            f"{worker.machine.waits(0)}, {worker.counts}"
        )

    def until_idle(self, worker: Worker) -> None:
        self.ticks(worker, 4)
        self.until(worker, lambda: not worker.machine.requests.by_key)

    def stop(self, worker: Worker) -> None:
        worker.runtime.run(lambda: True)

    # What came back

    def statuses(self) -> list[WorkerStatus]:
        metrics = [decode_metrics(record.value) for record in self.records(TOPICS.metrics)]
        texts: dict[tuple[str, int], WorkerStatus] = {}
        statuses = []
        for status in metrics:
            if isinstance(status, WorkerStatus):
                positions = (status.worker, status.incarnation)
                texts[positions] = merged(texts.get(positions), status)
                statuses.append(texts[positions])
        return statuses

    def trajectories(self) -> dict[str, Trajectory]:
        return {fact.trajectory: self.trajectory(fact) for fact in self.facts(TrajectoryLogged)}
