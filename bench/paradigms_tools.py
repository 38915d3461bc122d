"""Trains a task with tools in virtual time, for `bench paradigms --task tools`; decides nothing.

Production's machines, planner, engine, trainer, chat and task process do their real work on a real
model, which learns; only how long things take is drawn or fixed (`Pace`), so that no figure depends
on what else the machine does, and a run gives the same figures everywhere that it gives the same
bits. A tool takes as long as ROLL Flash's environments (arXiv 2510.11345), N(10, 10) s and none
below 0; the same call of the same trajectory takes the same time in every paradigm.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Final

from dora_pipe.bench.paradigms import WARM_STEPS, ParadigmRun, measure_run
from dora_pipe.config.model import Config
from dora_pipe.config.several import pool_specs
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.registry import make_learner
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import ResourceError
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.registry import open_engine
from dora_pipe.producers.tasks.calls import EnvStep, Forget, RewardCall, TaskCall, TaskEvent
from dora_pipe.producers.tasks.pool import TaskPool
from dora_pipe.producers.worker.chats import chat_options
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
"""How long one look into the task process waits; the pool's limits end what hangs."""

RUN_S: Final = 10**6
"""Of virtual time, within which a run has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How long things take, s. A turn of the calculator has six tokens: 3 s in a slot."""

    tool_mean_s: float = 10.0
    tool_deviation_s: float = 10.0
    token_s: float = 0.5
    """A step of an engine, whatever runs in it."""
    train_s: float = 30.0
    load_s: float = 2.0


def run_tools(
    config: Config,
    paradigm: str,
    *,
    target: float,
    pace: Pace = Pace(),
) -> ParadigmRun:
    """A whole run and its figures. Raises what a run raises, InvariantBroken unless its audit is
    clean, ResourceError where it does not end."""
    with TaskPool(config.task) as pool:
        pool.wait()
        parts = ToolParts.of(config, pool, pace)
        names = [f"w{number}" for number in range(config.workers.count)]
        with World(config, workers=[_plan(one, config, pace) for one in names], parts=parts) as run:
            if not run.run(until_ns=RUN_S * SECOND_NS):
                raise ResourceError(f"{paradigm}: not at its end after {RUN_S} s of virtual time")
            found = measure_run(
                run.bus, run.topics, paradigm=paradigm, seed=config.run.seed, target=target
            )
    training = (found.steps - WARM_STEPS) * pace.train_s / found.seconds
    return replace(found, training=training)  # the trainer's own clock is real


def _plan(name: str, config: Config, pace: Pace) -> WorkerPlan:
    return WorkerPlan(
        name=name,
        slots=config.workers.slots,
        prefetch=config.workers.prefetch,
        context_tokens=config.workers.context_tokens,
        token_ns=int(pace.token_s * SECOND_NS),
        load_ns=int(pace.load_s * SECOND_NS),
    )


@dataclass(frozen=True, kw_only=True)
class ToolParts(PlainParts):
    """A model that learns, and a task whose tools take their time."""

    start: Path
    """The model directory of version 0."""
    pool: TaskPool
    """One process for all workers: whose turn it is takes no time here."""
    pace: Pace
    sources: Mapping[str, DataSet]
    chat: Chat
    tokenizer: Tokenizer

    @classmethod
    def of(cls, config: Config, pool: TaskPool, pace: Pace) -> ToolParts:
        """The parts of a run whose task the pool has opened."""
        start, facts = Path(config.model.path), pool.facts
        assert facts is not None
        tokenizer = Tokenizer(start)
        return cls(
            steps_max=1,
            delays=Delays(train_ns=int(pace.train_s * SECOND_NS)),
            start=start,
            pool=pool,
            pace=pace,
            sources={name: facts.data(name) for one in pool_specs(config) for name in one.sources},
            chat=Chat.open(start, tokenizer, chat_options(config.task, 0)),
            tokenizer=tokenizer,
        )

    @property
    def single_turn(self) -> bool:
        """See `WorkerParts`."""
        return False

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """The model that it starts from."""
        return import_model(store, self.start)

    def data(self, config: Config) -> Mapping[str, DataSet]:
        """The task's own."""
        return self.sources

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        """Plain ports, with the task process behind the first."""
        made = super().worker(site, plan)
        tasks = LateTasks(site.clock, self.pool, self.pace, seed=site.config.run.seed)
        port = TimedTaskPort(TaskPort(tasks, self.tokenizer, self.chat), tasks)
        return replace(made, ports=[port, *made.ports[1:]], stop_ids=self.chat.stop_ids)

    def engine(self, site: Site, plan: WorkerPlan) -> Engine:
        """The one that the configuration means."""
        assets = site.store.assets_path(site.run_started.assets_digest)
        return open_engine(assets=assets, config=site.config, decode=self.tokenizer.full_text)

    def learner(self, site: Site) -> Learner:
        """The trainer that the configuration means."""
        started = site.run_started
        return make_learner(
            assets=site.store.assets_path(started.assets_digest),
            reference=site.store.weights_path(started.policy.digest),
            config=site.config,
        )


class LateTasks(SimTasks):
    """A task process that answers at once, and is heard when a tool's time is over."""

    def __init__(self, clock: Clock, pool: TaskPool, pace: Pace, *, seed: int) -> None:
        super().__init__(clock, answer=self._ask, delay_ns=self._delay_ns)
        self._pool, self._pace, self._seed = pool, pace, seed
        self._turns: Counter[str] = Counter()

    def start(self, effect: TaskCall | Forget) -> None:
        """See SimTasks; the process forgets too."""
        if isinstance(effect, Forget):
            self._pool.start(effect)
        if isinstance(effect, Forget | RewardCall):
            self._turns.pop(effect.request, None)
        super().start(effect)

    def _ask(self, call: TaskCall) -> TaskEvent:
        self._pool.start(call)
        while True:
            for event in self._pool.poll(ANSWER_S):
                assert event.request == call.request, "nobody else has asked"
                return event

    def _delay_ns(self, call: TaskCall) -> int:
        if not isinstance(call, EnvStep) or not call.turn.tool_calls:
            return 5 * MS
        trajectory = call.request.partition("/")[0]
        self._turns[call.request] += 1
        chance = Random(f"{self._seed} {trajectory} {self._turns[call.request]}")
        latency_s = chance.gauss(self._pace.tool_mean_s, self._pace.tool_deviation_s)
        return max(5 * MS, int(latency_s * SECOND_NS))
