"""Training of a task in virtual time for `bench paradigms`.

Training is real, durations are modeled (`Pace`). A tool takes N(10, 10) s, at least 0, as ROLL
Flash's environments (arXiv 2510.11345); equal calls take equal time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import msgspec

from dora_pipe.bench.studies.paper.hardware import EngineRates
from dora_pipe.bench.studies.paradigms import Cell, ParadigmRun, measure_run
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.consumers.trainer.effects import TrainPart, TrainStep
from dora_pipe.core.errors import ResourceError
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.calls import (
    EnvStep,
    Forget,
    RewardCall,
    TaskCall,
    TaskEffect,
    TaskEvent,
)
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.chats import chats_of
from dora_pipe.producers.worker.ports import TaskPort
from dora_pipe.schemas.control import DataSet
from dora_pipe.schemas.policy import Manifest
from dora_pipe.sim.parts import (
    MS,
    Delays,
    PlainParts,
    SimTasks,
    Site,
    TimedTaskPort,
    WorkerParts,
    WorkerPlan,
)
from dora_pipe.sim.world import SECOND_NS, World
from dora_pipe.store.model_dir import import_model
from dora_pipe.store.store import PolicyStore

ANSWER_S: Final = 1.0
"""Polling timeout."""

RUN_S: Final = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Durations in s."""

    rates: EngineRates
    train_s: float
    """Computing a whole batch; a part takes its share."""
    update_s: float
    """Additional time of a step: optimizer and writing the version."""
    tool_mean_s: float = 0.0
    tool_deviation_s: float = 0.0

    def shared_by(self, devices: int) -> Pace:
        """Divide training time."""
        return replace(self, train_s=self.train_s / devices)


TOOLS: Final = Pace(
    rates=EngineRates(tau_s=0.5, load_s=2.0),
    train_s=28.0,
    update_s=2.0,
    tool_mean_s=10.0,
    tool_deviation_s=10.0,
)
"""A calculator turn has six tokens: 3 s."""

DEMO: Final = Pace(
    rates=EngineRates(tau_s=0.005, rise=2.6, full=64, load_s=0.1), train_s=0.9, update_s=0.3
)
"""Demo model on two cores: 12 ms per token of 36 requests, a batch in 0.9 s; slowdown from
`bench engine`."""

GPU: Final = Pace(
    rates=EngineRates(tau_s=0.1, rise=1.0, full=64, load_s=1.0), train_s=6.0, update_s=1.0
)
"""A full engine of 64 requests takes twice as long per token, as when weights are read for every
token."""


PACES: Final[Mapping[str, Pace]] = {"demo": DEMO, "gpu": GPU, "tools": TOOLS}


def run_virtual(
    config: Config, cell: Cell, *, pace: Pace, setting: str, target: float
) -> ParadigmRun:
    """Return a run's figures. Raises what a run raises, InvariantBroken unless its audit passes,
    ResourceError if it does not end."""
    with TaskPool(config.task) as pool:
        pool.wait()
        parts = VirtualParts.of(config, pool, pace)
        names = [f"w{number}" for number in range(config.workers.count)]
        workers = [_plan(name, config, pace) for name in names]
        with World(config, workers=workers, parts=parts) as run:
            if not run.run(until_ns=RUN_S * SECOND_NS):
                raise ResourceError(f"{cell}: not at its end after {RUN_S} s of virtual time")
            measured = measure_run(run.bus, run.topics, cell=cell, setting=setting, target=target)
    training = measured.steps * (pace.train_s + pace.update_s) / measured.seconds
    return msgspec.structs.replace(measured, training=training)  # the trainer's own clock is real


def _plan(name: str, config: Config, pace: Pace) -> WorkerPlan:
    return WorkerPlan(
        name=name,
        slots=config.workers.max_num_seqs,
        prefetch=config.workers.prefetch,
        context_tokens=config.workers.max_model_len,
        load_ns=int(pace.rates.load_s * SECOND_NS),
        colocated=config.workers.is_colocated(name),
    )


@dataclass(frozen=True, kw_only=True)
class VirtualParts(PlainParts):
    """Real model, paced engine, timed tools."""

    start: Path
    pool: TaskPool
    """One process for all workers; its queueing takes no virtual time."""
    pace: Pace
    sources: Mapping[str, DataSet]
    chat: Chat | None
    tokenizer: Tokenizer
    per_step: int
    ahead: dict[int, int] = field(default_factory=dict)
    """Groups of a step already computed in parts."""

    @classmethod
    def of(cls, config: Config, pool: TaskPool, pace: Pace) -> VirtualParts:
        start, facts = Path(config.model.path), pool.facts
        assert facts is not None
        tokenizer = Tokenizer(start)
        specs = pool_specs(config)
        chats = chats_of([(specs[0], pool)], 0, start, tokenizer, stop=lambda: False)
        return cls(
            steps_max=1,
            delays=Delays(publish_ns=0),
            start=start,
            pool=pool,
            pace=pace,
            sources={name: facts.data(name) for spec in specs for name in spec.sources},
            chat=next(iter(chats.values()), None),
            tokenizer=tokenizer,
            per_step=config.rollout.prompts_per_step,
        )

    @property
    def single_turn(self) -> bool:
        facts = self.pool.facts
        return facts is not None and facts.single_turn

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        return import_model(store, self.start)

    def data(self, config: Config) -> Mapping[str, DataSet]:
        return self.sources

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        parts = super().worker(site, plan)
        tasks = LateTasks(site.clock, self.pool, self.pace, seed=site.config.run.seed)
        port = TimedTaskPort(TaskPort(tasks, self.tokenizer, self.chat), tasks)
        stops = self.tokenizer if self.chat is None else self.chat
        ports = self.worker_ports(site, port, None, self._engine_port(site, parts.engine, plan))
        return replace(parts, port=ports, stop_ids=stops.stop_ids)

    def step_ns(self, engine: Engine, plan: WorkerPlan) -> int:
        return int(self.pace.rates.tau(engine.active) * SECOND_NS)

    def work_ns(self, effect: Any) -> int:
        """Return a part's share; the last takes the rest."""
        match effect:
            case TrainPart(decision=part):
                groups = len(part.groups)
                self.ahead[part.step] = self.ahead.get(part.step, 0) + groups
                return int(self.pace.train_s * groups / self.per_step * SECOND_NS)
            case TrainStep(step=step):
                remaining = max(0.0, 1.0 - self.ahead.pop(step, 0) / self.per_step)
                return int((self.pace.train_s * remaining + self.pace.update_s) * SECOND_NS)
            case _:
                return super().work_ns(effect)

    def engine(self, site: Site, plan: WorkerPlan) -> Engine:
        assets = site.store.assets_path(site.run_started.assets_digest)
        return open_engine(assets=assets, config=site.config, decode=self.tokenizer.full_text)

    def learner(self, site: Site) -> Learner:
        started = site.run_started
        return make_learner(
            assets=site.store.assets_path(started.assets_digest),
            reference=site.store.weights_path(started.policy.digest),
            config=site.config,
        )


class LateTasks(SimTasks):
    """Task process whose answers are delayed."""

    def __init__(self, clock: Clock, pool: TaskPool, pace: Pace, *, seed: int) -> None:
        super().__init__(clock, answer=self._ask, delay_ns=self._delay_ns)
        self._pool, self._pace, self._seed = pool, pace, seed
        self._turns: Counter[str] = Counter()

    def start(self, effect: TaskEffect) -> None:
        if isinstance(effect, Forget):
            self._pool.start(effect)
        if isinstance(effect, Forget | RewardCall):
            self._turns.pop(effect.request, None)
        super().start(effect)

    def _ask(self, call: TaskCall) -> TaskEvent:
        self._pool.start(call)
        while True:
            for event in self._pool.poll(ANSWER_S):
                assert event.request == call.request, "there is no other request"
                return event

    def _delay_ns(self, call: TaskCall) -> int:
        if not isinstance(call, EnvStep) or not call.turn.tool_calls:
            return 5 * MS
        trajectory = call.request.partition("/")[0]
        self._turns[call.request] += 1
        chance = Random(f"{self._seed} {trajectory} {self._turns[call.request]}")
        latency_s = chance.gauss(self._pace.tool_mean_s, self._pace.tool_deviation_s)
        return max(5 * MS, int(latency_s * SECOND_NS))
