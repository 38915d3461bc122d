"""Run in one process: real loops with simulated roles, in turns on a virtual clock.

`tick` gives every role one turn and adds `TICK_NS`. The log may be a file; the task is inline;
engine and learner may be torch. Roles can be killed, frozen (no turns), made deaf (no decisions)
and restarted.

    with Cluster(tmp_path, make_config()) as cluster:
        cluster.run()
        cluster.kill("w1")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar

import msgspec

from dora_pipe.analysis.change import Change
from dora_pipe.analysis.replay import SourceRun, StepResult, replay_steps
from dora_pipe.audit.auditor import audit
from dora_pipe.audit.replay_trajectory import Regenerated, pick, regenerate
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.base import BusWrapper, ReaderWrapper, ends_of, records_of
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Config, max_resident_versions
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.ports import InlinePort
from dora_pipe.consumers.trainer.role import handlers_setup
from dora_pipe.core.loop.runtime import Meter, Runtime
from dora_pipe.core.pure.machine import StopAsked
from dora_pipe.core.pure.records import Append, Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.simulated import (
    END_TOKEN,
    Lengths,
    SimulatedEngine,
    long_tailed_length,
)
from dora_pipe.producers.tasks.calls import RewardCall, TaskEvent, TaskFailed
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import MemoryHandover
from dora_pipe.producers.worker.ports import (
    HandoverPort,
    RecordPort,
    TaskPort,
    TextCodec,
    WorkerPorts,
)
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.control import AnyControl, DataSet, decode_control
from dora_pipe.schemas.metrics import FailingServer
from dora_pipe.schemas.policy import Manifest, PolicyDtype
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import encode
from dora_pipe.sim.parts import (
    Numbers,
    PlainParts,
    Site,
    TrainerParts,
    WorkerParts,
    WorkerPlan,
    reward_of,
    text_digest,
)
from dora_pipe.sim.role import ORCHESTRATOR as ORCHESTRATOR
from dora_pipe.sim.role import TRAINER as TRAINER
from dora_pipe.sim.roles import create_topics, run_started, start_role
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import VirtualClock

T = TypeVar("T")
TICK_NS = 5_000_000
TICKS_MAX = 60_000
SEED = 5
"""Of the choice of random trajectories."""


def make_config(**changes: Any) -> Config:
    """Small run: 4 groups of 4 per step, max_staleness 2, 8 steps;
    ``make_config(run__steps=3)``."""
    plain: dict[str, Any] = {
        "run": {"name": "small", "steps": 8, "seed": 7},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "sampling": {"max_tokens": 96},
        "rollout": {"group_size": 4, "prompts_per_step": 4, "max_attempts": 5},
        "staleness": {"max_staleness": 2},
        "evaluation": {"prompts": 3, "every": 4, "sampling": {"max_tokens": 96}},
        "trainer": {"checkpoint_every": 3},
        "workers": {"max_num_seqs": 6, "max_model_len": 256, "checkpoint_tokens": 16},
        "bus": {"partitions": 3},
        "timing": {"heartbeat_s": 0.1, "lease_s": 1.0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        plain.setdefault(section, {})[name] = value
    return msgspec.convert(plain, Config)


@dataclass
class Ears:
    """Input filter of a role; `deaf` blocks records of other roles."""

    deaf: bool = False


class _BriskReader(ReaderWrapper):
    def __init__(self, reader: Reader, ears: Ears) -> None:
        super().__init__(reader)
        self._ears = ears

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        if self._ears.deaf:
            return []
        return super().poll(timeout_s=0.0, records_max=records_max, bytes_max=bytes_max)


class BriskBus(BusWrapper):
    def __init__(self, bus: Bus, ears: Ears) -> None:
        super().__init__(bus)
        self._ears = ears

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _BriskReader(self.inner.reader(positions), self._ears)


@dataclass
class Role:
    name: str
    machine: Any
    runtime: Runtime[Any, Any]
    ears: Ears
    frozen: bool = False


def reward_by_text(call: RewardCall) -> TaskEvent:
    """Hash the text to 0 or 1; one in 24 raises."""
    if text_digest(call) % 24 == 0:
        return TaskFailed(request=call.request, error="ValueError", message="no number in it")
    return reward_of(call)


class Parts(Protocol):
    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """Return version 0 and the digest of the assets, both in the store."""
        ...

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine: ...

    def texts(self, assets: Path) -> TextCodec: ...

    def stop_ids(self, assets: Path) -> tuple[int, ...]: ...

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner: ...


@dataclass(frozen=True)
class SimulatedParts:
    lengths: Lengths = long_tailed_length
    versions: int = 1
    """Versions served at a time."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        (assets := directory / "assets").mkdir(exist_ok=True)
        return PlainParts().policy(store, assets)

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine:
        workers = config.workers
        return SimulatedEngine(
            slots=workers.max_num_seqs,
            context_tokens=workers.max_model_len,
            max_resident_versions=self.versions,
            lengths=self.lengths,
            clock=clock,
        )

    def texts(self, assets: Path) -> TextCodec:
        return Numbers()

    def stop_ids(self, assets: Path) -> tuple[int, ...]:
        return (END_TOKEN,)

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner:
        return SimulatedLearner()


@dataclass(frozen=True)
class TorchParts:
    model: Path
    dtype: PolicyDtype = "float32"
    """Type of published weights."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        return import_model(store, self.model, self.dtype)

    def engine(self, assets: Path, config: Config, clock: Clock) -> Engine:
        from dora_pipe.producers.engines.torch.engine import TorchEngine

        workers = config.workers
        return TorchEngine.open(
            assets,
            slots=workers.max_num_seqs,
            context_tokens=workers.max_model_len,
            threads=1,
            decode=Tokenizer(assets).full_text,
            lora_rank=config.lora.rank,
            max_resident_versions=max_resident_versions(config),
            routes=config.sampling.return_routed_experts,
        )

    def texts(self, assets: Path) -> TextCodec:
        return Tokenizer(assets)

    def stop_ids(self, assets: Path) -> tuple[int, ...]:
        return tuple(Tokenizer(assets).stop_ids)

    def trainer(self, assets: Path, reference: Path, config: Config) -> Learner:
        return make_learner(assets=assets, reference=reference, config=config)


class SlowPort(InlinePort):
    """Inline trainer work with a delay before each event."""

    def __init__(self, handlers: EffectHandlers, ticks: int) -> None:
        super().__init__(handlers)
        self._ticks = ticks
        self._left = ticks

    def poll(self) -> list[Any]:
        if self.busy and self._left:
            self._left -= 1
            return []
        self._left = self._ticks
        return super().poll()


@dataclass
class Cluster:
    directory: Path
    config: Config = field(default_factory=make_config)
    on_disk: bool = True
    workers: Sequence[str] = ("w0", "w1", "w2")
    parts: Parts = field(default_factory=SimulatedParts)
    tasks: Callable[[], InlineTasks] = lambda: InlineTasks(reward=reward_by_text)
    train_ticks: int = 12
    """Turns of a training step."""
    failing: tuple[FailingServer, ...] = ()
    """Task locations that every worker reports as failing."""

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.topics = Topics(self.config.run.name)
        self.store = PolicyStore(self.directory / "policies")
        self.roles: dict[str, Role] = {}
        self.handover = MemoryHandover()
        self._buses: list[Bus] = []
        self._log = MemoryLog()
        self._numbers = count()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.bus = self.open_bus()
        create_topics(self.bus, self.topics, self.config)
        self.run_started = run_started(self.config, self, self.store, self.directory, self.clock)
        for name in (ORCHESTRATOR, *self.workers, TRAINER):
            self.start(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def source(self) -> SourceRun:
        reference = self.store.weights_path(self.run_started.policy.digest)
        return SourceRun(
            bus=self.bus,
            topics=self.topics,
            store=self.store,
            make=lambda started: self.parts.trainer(self.assets, reference, self.config),
            clock=self.clock,
        )

    def replayed(
        self, first: int, last: int, settings: Mapping[str, str | float] = MappingProxyType({})
    ) -> list[StepResult]:
        return [*replay_steps(self.source, range(first, last), Change(settings=dict(settings)))]

    @property
    def path(self) -> Path:
        return self.directory / "log.sqlite"

    @property
    def assets(self) -> Path:
        return self.store.assets_path(self.run_started.assets_digest)

    def open_bus(self, ears: Ears | None = None) -> Bus:
        bus = self.open_log()
        self._buses.append(bus)
        return BriskBus(bus, ears or Ears())

    def open_log(self) -> Bus:
        if self.on_disk:
            return SqliteBus(self.path)
        return MemoryBus(self._log, now_ms=lambda: self.clock.ns // 1_000_000)

    def start(self, name: str) -> None:
        assert name not in self.roles
        ears, sizes = Ears(), self.config.workers
        site = Site(
            name=name,
            number=next(self._numbers),
            topics=self.topics,
            config=self.config,
            clock=self.clock,
            meter=Meter(),
            chance=Random(0),
            store=self.store,
            bus=self.open_bus(ears),
            open_bus=self.open_bus,
            run_started=self.run_started,
        )
        plan = WorkerPlan(
            name=name,
            slots=sizes.max_num_seqs,
            prefetch=sizes.prefetch,
            context_tokens=sizes.max_model_len,
            colocated=sizes.is_colocated(name),
        )
        started = start_role(site, self, plan)
        runtime = started.loop(site, turn_ns=0)
        self.roles[name] = Role(name=name, machine=started.machine, runtime=runtime, ears=ears)

    def kill(self, name: str) -> None:
        del self.roles[name]

    def restart(self, name: str) -> None:
        self.kill(name)
        self.start(name)

    def stop(self, name: str) -> None:
        self.roles[name].runtime._events.append(StopAsked())

    def tick(self) -> None:
        for name, role in list(self.roles.items()):
            if not role.frozen:
                role.runtime.tick()
                if role.machine.finished:
                    role.runtime.close()
                    del self.roles[name]
        self.clock.ns += TICK_NS

    def ticks(self, count: int) -> None:
        for _ in range(count):
            self.tick()

    def until(self, done: Callable[[], bool], ticks_max: int = TICKS_MAX) -> None:
        for _ in range(ticks_max):
            if done():
                return
            self.tick()
        raise AssertionError(f"not within {ticks_max} ticks; there are {sorted(self.roles)}")

    def run(self) -> None:
        self.until(lambda: not self.roles)

    def tell(self, fact: AnyControl) -> None:
        """Append a control record, as a user would."""
        append = Append(topic=self.topics.control, value=encode(fact))
        self.bus.writer().append([append])

    def records(self, topic: str) -> list[Record]:
        return list(records_of(self.bus, ends_of(self.bus, topic)))

    def facts(self, kind: type[T]) -> list[T]:
        facts = [decode_control(record.value) for record in self.records(self.topics.control)]
        return [fact for fact in facts if isinstance(fact, kind)]

    def clean_report(self) -> AuditReport:
        """Return the audit of log and store, which must hold."""
        report = audit(self.bus, self.topics, self.store.root)
        assert report.holds, [violation.line for violation in report.violations[:8]]
        return report

    def regenerated(
        self, names: Sequence[str] | int, engine: Engine | None = None
    ) -> list[Regenerated]:
        """Regenerate trajectories, or that many random ones."""
        stop_ids = self.parts.stop_ids(self.assets)
        settings = {"train": self.config.sampling, "eval": self.config.eval_sampling()}
        params = {name: sampling_params(setting, stop_ids) for name, setting in settings.items()}
        engine = engine or self.parts.engine(self.assets, self.config, self.clock)
        with closing(read_catalogue(self.bus, self.topics)) as tables:
            chosen = pick(tables, names, SEED) if isinstance(names, int) else names
            log = (self.bus, self.topics, self.store.root, tables)
            return list(regenerate(*log, engine, chosen, params))

    @property
    def version(self) -> int:
        return int(self.roles[ORCHESTRATOR].machine.state.version)

    def close(self) -> None:
        for role in self.roles.values():
            role.runtime.close()
        for bus in self._buses:
            bus.close()

    # Interface of `dora_pipe.sim.parts.Parts`

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        return self.parts.policy(store, directory)

    def data(self, config: Config) -> Mapping[str, DataSet]:
        return {}

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        tasks = self.tasks()
        engine = self.parts.engine(self.assets, self.config, self.clock)
        if self.config.lora.rank:
            first = self.run_started.policy.digest
            engine.load(self.store.weights(first), version=0, digest=first)
            engine.drop(0)
        return WorkerParts(
            port=WorkerPorts(
                tasks=TaskPort(tasks, self.parts.texts(self.assets)),
                sessions=None,
                records=RecordPort(
                    self.open_bus(), self.topics, site.meter, clock=self.clock, in_thread=False
                ),
                handover=HandoverPort(self.handover, in_thread=False),
                engine=self.engine_port(engine, self.store_of(site.name)),
            ),
            engine=engine,
            single_turn=not tasks.episodes or tasks.replayable,
            stop_ids=self.parts.stop_ids(self.assets),
            failing=lambda: self.failing,
        )

    def engine_port(self, engine: Engine, store: PolicyStore) -> EnginePort:
        return EnginePort(
            engine,
            store.weights,
            verify=store.verify,
            clock=self.clock,
            in_thread=False,
            steps_max=1,
        )

    def store_of(self, worker: str) -> PolicyStore:
        return self.store

    def trainer(self, site: Site, history: CommitHistory) -> TrainerParts:
        handlers = EffectHandlers(
            handlers_setup(self.topics, self.run_started, self.config, history, adopt=False),
            bus=self.open_bus(),
            store=self.store,
            make_learner=self._make_learner,
            clock=self.clock,
            meter=site.meter,
        )
        port = SlowPort(handlers, self.train_ticks)
        return TrainerParts(port=port, cached=port.cached)

    def _make_learner(self) -> Learner:
        reference = self.store.weights_path(self.run_started.policy.digest)
        return self.parts.trainer(self.assets, reference, self.config)
