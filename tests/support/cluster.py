"""A whole run in one process: the three real machines in the real loop, on one virtual clock.

The task answers inline, engine and trainer are simulated unless other `parts` are given; machines,
log and policy store are what production runs. `tick` gives every role one turn and moves time by
`TICK_NS`. A role can be killed, frozen (no turns), made deaf (no decisions) and started again.

Example::

    with Cluster(tmp_path, make_config()) as cluster:
        cluster.run()
        cluster.kill("w1")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec

from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, Bus, TopicPartition, TopicSpec, Writer
from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.machine import KEY, TrainerMachine, TrainerSetup
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.consumers.trainer.role import handlers_setup
from dora_pipe.core.runtime import Meter, Runtime, StopAsked
from dora_pipe.core.status_schedule import quiet_ns
from dora_pipe.orchestrator.planner import PLANNER
from dora_pipe.orchestrator.role import Instance, start_machine
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.registry import capabilities
from dora_pipe.producers.tasks.calls import RewardCall, Rewarded, TaskEvent, TaskFailed
from dora_pipe.producers.worker.kv_handover import MemoryHandover
from dora_pipe.producers.worker.machine import WorkerMachine
from dora_pipe.producers.worker.ports import (
    CodecPort,
    EnginePort,
    HandoverPort,
    ProgressPort,
    TaskPort,
)
from dora_pipe.producers.worker.request import WorkerSetup
from dora_pipe.producers.worker.role import sampling_params
from dora_pipe.schemas.control import RoleStarted, RunStarted, WorkerJoined, config_digest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import SCHEMA_VERSION, encode, sha256_hex
from dora_pipe.store.store import PolicyStore
from tests.support.brisk_bus import BriskBus, Ears
from tests.support.cluster_parts import Parts, SimulatedParts, SlowPort, limits_of
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import VirtualClock

TICK_NS = 5_000_000
TICKS_MAX = 60_000
DATASET, EVAL_DATASET = sha256_hex(b"train rows"), sha256_hex(b"eval rows")
ROWS, EVAL_ROWS = 40, 3
ORCHESTRATOR, TRAINER = "orchestrator", "trainer"


def make_config(**changes: Any) -> Config:
    """A small run: 4 groups of 4 per step, eta 2, 8 steps; ``make_config(run__steps=3)``."""
    plain: dict[str, Any] = {
        "run": {"name": "small", "steps": 8, "seed": 7},
        "model": {"path": "model"},
        "task": {"kind": "arithmetic"},
        "sampling": {"max_tokens": 96},
        "groups": {"size": 4, "per_step": 4, "attempts_max": 5},
        "staleness": {"max_staleness": 2},
        "evaluation": {"prompts": 3, "every": 4, "sampling": {"max_tokens": 96}},
        "trainer": {"checkpoint_every": 3},
        "workers": {
            "slots": 6,
            "prefetch": 2,
            "context_tokens": 256,
            "checkpoint_tokens": 16,
        },
        "bus": {"partitions": 3},
        "timing": {"heartbeat_s": 0.1, "lease_s": 1.0, "plan_period_s": 5.0},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        plain.setdefault(section, {})[name] = value
    return msgspec.convert(plain, Config)


@dataclass
class Role:
    """A role that runs."""

    name: str
    machine: Any
    runtime: Runtime
    ears: Ears
    frozen: bool = False
    engine: Engine | None = None
    tasks: InlineTasks | None = None


def reward_by_text(call: RewardCall) -> TaskEvent:
    """0 or 1 by a digest of the text; one in 24 raises."""
    drawn = int(sha256_hex(call.text.encode(), call.request.partition("/")[0].encode())[:8], 16)
    if drawn % 24 == 0:
        return TaskFailed(request=call.request, error="ValueError", message="no number in it")
    value = float(drawn % 2)
    return Rewarded(request=call.request, reward=value, raw=value, parts={"exact": value})


@dataclass
class Cluster:
    """See the head of this file. `workers` are started at once, with orchestrator and trainer."""

    directory: Path
    config: Config = field(default_factory=make_config)
    on_disk: bool = True
    workers: Sequence[str] = ("w0", "w1", "w2")
    parts: Parts = field(default_factory=SimulatedParts)
    tasks: Callable[[], InlineTasks] = lambda: InlineTasks(reward=reward_by_text)
    train_ticks: int = 12
    """Turns of the loop that a training step takes."""

    def __post_init__(self) -> None:
        self.clock = VirtualClock()
        self.topics = Topics(self.config.run.name)
        self.store = PolicyStore(self.directory / "policies")
        self.roles: dict[str, Role] = {}
        self.handover = MemoryHandover()
        self._buses: list[Bus] = []
        self._log = MemoryLog()
        self.directory.mkdir(parents=True, exist_ok=True)
        self.bus = self.open_bus()
        partitions = self.config.bus.partitions
        many = {self.topics.trajectories: partitions, self.topics.progress: partitions}
        largest = self.config.bus.record_bytes_max
        self.bus.create(
            [
                TopicSpec(name=name, partitions=many.get(name, 1), record_bytes_max=largest)
                for name in self.topics.all()
            ]
        )
        self.run_started = self._run_started()
        for name in (ORCHESTRATOR, *self.workers, TRAINER):
            self.start(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def path(self) -> Path:
        """The SQLite log."""
        return self.directory / "log.sqlite"

    @property
    def assets(self) -> Path:
        """The model's config and tokenizer files."""
        return self.store.assets_path(self.run_started.assets_digest)

    def open_bus(self, ears: Ears | None = None) -> Bus:
        """A bus of its own on the cluster's log."""
        bus = self.open_log()
        self._buses.append(bus)
        return BriskBus(bus, ears or Ears())

    def open_log(self) -> Bus:
        """The log itself."""
        if self.on_disk:
            return SqliteBus(self.path)
        return MemoryBus(self._log, now_ms=lambda: self.clock.ns // 1_000_000)

    def start(self, name: str) -> None:
        """Start a role that does not run."""
        assert name not in self.roles
        if name == ORCHESTRATOR:
            self.roles[name] = self._orchestrator()
        elif name == TRAINER:
            self.roles[name] = self._trainer()
        else:
            self.roles[name] = self._worker(name)

    def kill(self, name: str) -> None:
        """What SIGKILL does: nothing more is said."""
        del self.roles[name]

    def restart(self, name: str) -> None:
        """Kill and start again."""
        self.kill(name)
        self.start(name)

    def stop(self, name: str) -> None:
        """What SIGTERM does: the role ends in order, in the ticks that follow."""
        self.roles[name].runtime._events.append(StopAsked())

    def tick(self) -> None:
        """One turn of every role that is not frozen; those that have ended go."""
        for name, role in list(self.roles.items()):
            if not role.frozen:
                role.runtime.tick()
                if role.machine.finished:
                    role.runtime.close()
                    del self.roles[name]
        self.clock.ns += TICK_NS

    def ticks(self, count: int) -> None:
        """So many turns."""
        for _ in range(count):
            self.tick()

    def until(self, done: Callable[[], bool], ticks_max: int = TICKS_MAX) -> None:
        """Tick until something holds."""
        for _ in range(ticks_max):
            if done():
                return
            self.tick()
        raise AssertionError(f"not within {ticks_max} ticks; there are {sorted(self.roles)}")

    def run(self) -> None:
        """Until the run is over and every role has gone."""
        self.until(lambda: not self.roles)

    @property
    def version(self) -> int:
        """The newest one, as the orchestrator knows it."""
        return int(self.roles[ORCHESTRATOR].machine.state.version)

    def close(self) -> None:
        """Close everything."""
        for role in self.roles.values():
            role.runtime.close()
        for bus in self._buses:
            bus.close()

    def _run_started(self) -> RunStarted:
        policy, assets_digest = self.parts.policy(self.store, self.directory)
        plain = msgspec.to_builtins(self.config)
        return RunStarted(
            at_ns=self.clock.wall_ns(),
            run=self.config.run.name,
            schema_version=SCHEMA_VERSION,
            config=plain,
            config_digest=config_digest(plain),
            dataset_digest=DATASET,
            dataset_rows=ROWS,
            eval_digest=EVAL_DATASET,
            eval_rows=EVAL_ROWS,
            seed=self.config.run.seed,
            policy=policy,
            assets_digest=assets_digest,
            planner=PLANNER,
            package="0",
        )

    def _runtime(
        self, machine: Any, bus: Bus, writer: Writer, ports: Sequence[Any], meter: Meter
    ) -> Runtime:
        return Runtime(
            machine,
            bus=bus,
            writer=writer,
            ports=ports,
            clock=self.clock,
            meter=meter,
            exclusive=(exclusive := not isinstance(machine, WorkerMachine)),
            status=bus.writer() if exclusive else None,
            turn_ns=0,
        )

    def _orchestrator(self) -> Role:
        ears, meter = Ears(), Meter()
        bus = self.open_bus(ears)
        writer = bus.writer(exclusive=f"{self.topics.run}.orchestrator")
        machine = start_machine(
            bus=bus,
            writer=writer,
            topics=self.topics,
            timing=self.config.timing,
            clock=self.clock,
            instance=Instance(name="o", host="h", pid=1, package="0"),
            meter=meter,
            run_started=self.run_started,
        )
        runtime = self._runtime(machine, bus, writer, (), meter)
        return Role(name=ORCHESTRATOR, machine=machine, runtime=runtime, ears=ears)

    def _trainer(self) -> Role:
        ears, meter = Ears(), Meter()
        bus = self.open_bus(ears)
        writer = bus.writer(exclusive=f"{self.topics.run}.trainer")
        history = read_history(bus, self.topics, self.clock)
        started = RoleStarted(
            at_ns=self.clock.wall_ns(),
            role="trainer",
            role_epoch=history.role_epoch + 1,
            instance="t",
            host="h",
            pid=1,
            package="0",
        )
        writer.append([Append(topic=self.topics.control, key=KEY, value=encode(started))])
        handlers = EffectHandlers(
            handlers_setup(self.topics, self.run_started, self.config, history, adopt=False),
            bus=self.open_bus(),
            store=self.store,
            make_learner=self._make_trainer,
            clock=self.clock,
            meter=meter,
        )
        port = SlowPort(handlers, self.train_ticks)
        setup = TrainerSetup(
            topics=self.topics,
            role_epoch=started.role_epoch,
            checkpoint_every=self.config.trainer.checkpoint_every,
            keep_every=self.config.store.keep_every,
            heartbeat_ns=int(self.config.timing.heartbeat_s * 1e9),
            quiet_ns=quiet_ns(self.config.timing),
            limits=limits_of(self.config),
        )
        machine = TrainerMachine(setup, history, cost=meter.cost, cached=port.cached)
        runtime = self._runtime(machine, bus, writer, [port], meter)
        return Role(name=TRAINER, machine=machine, runtime=runtime, ears=ears)

    def _worker(self, name: str) -> Role:
        ears, meter, tasks = Ears(), Meter(), self.tasks()
        bus = self.open_bus(ears)
        writer = bus.writer()
        decisions_from = bus.end(TopicPartition(self.topics.decisions, 0))
        engine = self.parts.engine(self.assets, self.config, self.clock)
        if self.config.lora.rank:
            first = self.run_started.policy.digest
            engine.load(self.store.weights(first), version=0, digest=first)
            engine.drop(0)
        joined = Append(topic=self.topics.control, value=encode(self._joined(name, engine, tasks)))
        setup = self._setup(name, engine, writer.append([joined])[0], decisions_from)
        machine = WorkerMachine(setup, cost=meter.cost, kv_used=lambda: engine.kv_used_tokens)
        ports = [
            EnginePort(
                engine, self.store.weights_path, clock=self.clock, in_thread=False, steps_max=1
            ),
            TaskPort(tasks, self.parts.texts(self.assets)),
            CodecPort(meter, clock=self.clock),
            ProgressPort(self.open_bus(), self.topics.progress, meter, clock=self.clock),
            HandoverPort(self.handover, in_thread=False),
        ]
        runtime = self._runtime(machine, bus, writer, ports, meter)
        return Role(
            name=name, machine=machine, runtime=runtime, ears=ears, engine=engine, tasks=tasks
        )

    def _make_trainer(self) -> Learner:
        reference = self.store.weights_path(self.run_started.policy.digest)
        return self.parts.trainer(self.assets, reference, self.config)

    def _joined(self, name: str, engine: Engine, tasks: InlineTasks) -> WorkerJoined:
        return WorkerJoined(
            at_ns=self.clock.wall_ns(),
            worker=name,
            instance=f"{name}-{self.clock.ns}",
            host="h",
            pid=1,
            slots=engine.slots,
            prefetch=self.config.workers.prefetch,
            kv_tokens=engine.slots * engine.context_tokens,
            engine=engine.name,
            engine_version=engine.version,
            dtype=engine.dtype,
            device=engine.device,
            declares=capabilities(engine, single_turn=not tasks.episodes),
            assets_digest=self.run_started.assets_digest,
            reward_digest="",
            package="0",
            versions_resident=engine.versions_resident,
        )

    def _setup(self, name: str, engine: Engine, epoch: int, decisions_from: int) -> WorkerSetup:
        config, stops = self.config, self.parts.stop_ids(self.assets)
        return WorkerSetup(
            topics=self.topics,
            worker=name,
            epoch=epoch,
            slots=config.workers.slots,
            prefetch=config.workers.prefetch,
            context_tokens=config.workers.context_tokens,
            checkpoint_tokens=config.workers.checkpoint_tokens,
            turns_max=config.task.turns_max,
            interruptible=config.staleness.interruptible,
            heartbeat_ns=int(config.timing.heartbeat_s * 1e9),
            quiet_ns=quiet_ns(config.timing),
            limits=limits_of(config),
            stop_timeout_ns=int(config.timing.stop_timeout_s * 1e9),
            decisions_from=decisions_from,
            digests={"train": DATASET, "eval": EVAL_DATASET},
            params={
                "train": sampling_params(config.sampling, stops),
                "eval": sampling_params(config.evaluation.sampling, stops),
            },
            versions_resident=engine.versions_resident,
        )
