"""Parts of a world; implement `Parts` to replace engine, trainer, codec or task."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from dora_pipe.bus.bus import Bus
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.learner import Learner
from dora_pipe.consumers.learners.simulated import SimulatedLearner, initial_weights
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effect_handlers import EffectHandlers
from dora_pipe.consumers.trainer.effects import (
    DropFiles,
    FetchBatch,
    PublishPolicy,
    Restore,
    TrainerEffect,
    TrainerEvent,
    TrainPart,
    TrainStep,
    WriteHistory,
)
from dora_pipe.consumers.trainer.role import handlers_setup
from dora_pipe.consumers.trainer.status import Gauges
from dora_pipe.core.loop.runtime import Meter, Port
from dora_pipe.core.system.clock import Clock
from dora_pipe.orchestrator.rows import RowStats
from dora_pipe.producers.engines.engine import Engine
from dora_pipe.producers.engines.simulated import (
    END_TOKEN,
    Lengths,
    SimulatedEngine,
    long_tailed_length,
)
from dora_pipe.producers.sessions.frames import Addresses
from dora_pipe.producers.tasks.calls import (
    AgentCall,
    EnvObserved,
    EnvStep,
    EpisodeLost,
    Forget,
    GroupCall,
    GroupRewarded,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskCall,
    TaskEffect,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import LoadWeights
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import Handover, MemoryHandover
from dora_pipe.producers.worker.ports import HandoverPort, RecordPort, TaskPort, WorkerPorts
from dora_pipe.schemas.control import DataSet, RunStarted
from dora_pipe.schemas.metrics import Cost, FailingServer
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.paced_port import PacedPort, TrainerPorts
from dora_pipe.sim.role import NEVER_NS, SimPort
from dora_pipe.store.store import PolicyStore

MS: Final = 1_000_000
CONTEXT_TOKENS: Final = 256
_UNTIMED: Final = nullcontext()


class StillMeter(Meter):
    """Meter without costs: real time must not enter."""

    def __init__(self) -> None:
        self._none = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)

    def spend(self, name: str) -> AbstractContextManager[None]:
        return _UNTIMED

    def cost(self) -> Cost:
        return self._none


class Numbers:
    """Tokenizer: text is token ids in decimal."""

    def prompt_ids(self, text: str) -> list[int]:
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def check_unrendered(self, text: str) -> None:
        """Accept every text."""


class SimTasks:
    """Task pool without processes: `answer` replies after `delay_ns`."""

    def __init__(
        self,
        clock: Clock,
        *,
        answer: Callable[[TaskCall], TaskEvent],
        delay_ns: Callable[[TaskCall], int],
        agents: Agents | None = None,
    ) -> None:
        self._clock = clock
        self._answer = answer
        self._delay_ns = delay_ns
        self._agents = agents
        self._episodes: dict[str, None] = {}
        self._lost: list[EpisodeLost] = []
        self._calls: dict[str, tuple[int, TaskCall]] = {}
        self._due_ns = NEVER_NS

    @property
    def busy(self) -> bool:
        return self._clock.now_ns() >= self._due_ns

    def due_ns(self) -> int:
        return self._due_ns

    def start(self, effect: TaskEffect) -> None:
        if isinstance(effect, Forget):
            self._forget(effect.request)
            return
        if isinstance(effect, PromptCall | AgentCall):
            self._forget(effect.request)
        assert effect.request not in self._calls, f"{effect.request} already has a call"
        if isinstance(effect, AgentCall):
            assert self._agents is not None, "agents run nowhere here"
            self._agents.begin(effect)
            return
        due_ns = self._clock.now_ns() + self._delay_ns(effect)
        self._calls[effect.request] = due_ns, effect
        self._due_ns = min(self._due_ns, due_ns)

    def poll(self) -> Sequence[TaskEvent]:
        if not self.busy:
            return ()
        now_ns = self._clock.now_ns()
        ready = [name for name, (due_ns, _) in self._calls.items() if due_ns <= now_ns]
        events = [self._answer(self._calls.pop(name)[1]) for name in ready]
        for event in events:
            if isinstance(event, PromptReady) and event.episode:
                self._episodes[event.request] = None
            elif isinstance(event, Rewarded | TaskFailed | EpisodeLost):
                self._episodes.pop(event.request, None)
        events, self._lost = [*self._lost, *events], []
        self._settle()
        return events

    def lose(self, message: str) -> bool:
        """Simulate the death of a process; report whether it had episodes or agents."""
        agents = self._agents.many if self._agents is not None else 0
        lost = list(self._episodes)
        for name in lost:
            self._forget(name)
            self._lost.append(EpisodeLost(request=name, message=message))
        if self._agents is not None:
            self._agents.lose(message)
        self._settle()
        return bool(lost or agents)

    def close(self) -> None:
        self._calls.clear()
        self._lost.clear()
        self._due_ns = NEVER_NS

    def _forget(self, request: str) -> None:
        self._episodes.pop(request, None)
        self._lost = [entry for entry in self._lost if entry.request != request]
        if self._agents is not None:
            self._agents.forget(request)
        if self._calls.pop(request, None) is not None:
            self._settle()

    def _settle(self) -> None:
        due_ns = min((due_ns for due_ns, _ in self._calls.values()), default=NEVER_NS)
        self._due_ns = self._clock.now_ns() if self._lost else due_ns


def prompt_of(call: PromptCall, *, episode: bool = False, replayable: bool = False) -> PromptReady:
    """Return a prompt that encodes the row."""
    row = call.index
    words = [3 + row % 89, 4 + row // 89 % 89, 5 + row % 7]
    text = " ".join(map(str, words + words[: row % 4]))
    return PromptReady(request=call.request, text=text, episode=episode, replayable=replayable)


def observed_of(call: EnvStep, *, done: bool, text: str = "8 9") -> EnvObserved:
    return EnvObserved(request=call.request, text=text, done=done, tool="tool", ok=True)


ADDRESSES: Final = Addresses(host="sim", port=1, secret=b"sim")


class TimedTaskPort:
    """Task port on `SimTasks`."""

    def __init__(self, inner: Port[Any, Any], tasks: SimTasks) -> None:
        self.lose = tasks.lose
        self.start = inner.start
        self.poll = inner.poll
        self.close = inner.close
        self._tasks = tasks

    @property
    def busy(self) -> bool:
        return self._tasks.busy

    def due_ns(self) -> int:
        return self._tasks.due_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    name: str
    slots: int
    prefetch: int
    context_tokens: int = CONTEXT_TOKENS
    token_ns: int = 2 * MS
    """Duration of an engine step, for any batch size."""
    load_ns: int = 200 * MS
    """Duration of loading a version."""
    rate: float = 1.0
    versions: int = 1
    colocated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Starting incarnation and its resources."""

    name: str
    number: int
    topics: Topics
    config: Config
    clock: Clock
    meter: Meter
    chance: Random
    store: PolicyStore
    bus: Bus
    open_bus: Callable[[], Bus]
    run_started: RunStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Ports, all `SimPort`, and the engine."""

    port: WorkerPorts
    engine: Engine
    single_turn: bool = True
    """Whether requests can move: without episodes, or with `PromptReady(episode=True,
    replayable=True)`. Such an episode resumes with `FetchProgress`, `PromptCall`, then one
    `EnvStep` per recorded turn, answered as before (`worker.episodes`)."""
    stop_ids: tuple[int, ...] = (END_TOKEN,)
    failing: Callable[[], tuple[FailingServer, ...]] = tuple


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    port: Port[TrainerEffect, TrainerEvent]
    cached: Callable[[], Gauges] = lambda: Gauges(0, 0)


class Parts(Protocol):
    """Factory of a world's parts."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]: ...

    def data(self, config: Config) -> Mapping[str, DataSet]: ...

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts: ...

    def trainer(self, site: Site, history: CommitHistory) -> TrainerParts: ...


def episode_of(request: str) -> str:
    """Return the trajectory of a request: ``episode_of("g0000000042-003.18.1/2")``."""
    return request.partition("/")[0].partition(".")[0]


def text_digest(call: RewardCall) -> int:
    """Return a number by text and trajectory."""
    return int(sha256_hex(call.completion.text.encode(), episode_of(call.request).encode())[:8], 16)


def reward_of(call: RewardCall) -> Rewarded:
    """Return reward 0 or 1 by digest."""
    value = float(text_digest(call) % 2)
    return Rewarded(request=call.request, reward=value, raw=value, parts={"exact": value})


def group_rewards_of(call: GroupCall) -> GroupRewarded:
    """Return rewards by rank of the text."""
    texts = sorted(completion.text for completion in call.completions)
    rewards = tuple(texts.index(completion.text) / len(texts) for completion in call.completions)
    return GroupRewarded(
        request=call.request, rewards=rewards, parts=tuple({"rank": reward} for reward in rewards)
    )


def weights(rows: Sequence[RowStats], version: int) -> list[float]:
    """Sampler that depends on all its inputs."""
    return [(1 + version % 3) * row.mean + 1 / (1 + row.groups) for row in rows]


def answer_of(call: TaskCall) -> TaskEvent:
    """Answer in one turn, with a reward by the text."""
    if isinstance(call, PromptCall):
        return prompt_of(call)
    if isinstance(call, EnvStep):
        return observed_of(call, done=True)
    if isinstance(call, GroupCall):
        return group_rewards_of(call)
    assert isinstance(call, RewardCall), "agents are no calls of a pool"
    return reward_of(call)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """Delays outside the engine."""

    task_ns: int = 5 * MS
    """Delay of a prompt, and of a quick task's turn or reward."""
    slow_ns: int = 0
    """Additional delay of a tool's turn and a judge's reward."""
    progress_ns: int = 2 * MS
    handover_ns: int = 4 * MS
    restore_ns: int = 50 * MS
    fetch_ns: int = 20 * MS
    train_ns: int = 300 * MS
    publish_ns: int = 30 * MS
    again_ns: int = 5 * MS

    def of_task(self, call: TaskCall) -> int:
        """Return a call's duration."""
        return self.task_ns + (0 if isinstance(call, PromptCall) else self.slow_ns)


def _paced(port: Port[Any, Any], clock: Clock, delay_ns: int, again_ns: int) -> SimPort:
    return PacedPort(port, clock, delay_ns=lambda effect: delay_ns, again_ns=lambda: again_ns)


@dataclass(frozen=True, kw_only=True)
class PlainParts:
    """Default parts; one event covers at most `steps_max` engine steps."""

    lengths: Lengths = long_tailed_length
    delays: Delays = field(default_factory=Delays)
    steps_max: int = 8
    answer: Callable[[TaskCall], TaskEvent] = answer_of
    handover: Handover = field(default_factory=MemoryHandover)

    @property
    def single_turn(self) -> bool:
        return True

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        assets = directory / "config.json"
        assets.write_text(json.dumps({"model_type": "simulated"}))
        digest = store.publish_assets([assets])
        return store.publish_weights(initial_weights), digest

    def data(self, config: Config) -> Mapping[str, DataSet]:
        return {}

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        """Return production's ports, paced."""
        engine = self.engine(site, plan)
        agents = self.agents(site)
        tasks = self.tasks(site, agents)
        return WorkerParts(
            port=self.worker_ports(
                site,
                TimedTaskPort(TaskPort(tasks, Numbers(), addresses=ADDRESSES), tasks),
                agents,
                self._engine_port(site, engine, plan),
            ),
            engine=engine,
            single_turn=self.single_turn,
        )

    def trainer(self, site: Site, history: CommitHistory) -> TrainerParts:
        handlers = EffectHandlers(
            handlers_setup(site.topics, site.run_started, site.config, history, adopt=False),
            bus=site.open_bus(),
            store=site.store,
            make_learner=lambda: self.learner(site),
            clock=site.clock,
            meter=site.meter,
        )
        port = TrainerPorts(handlers, site.clock, self.work_ns, self.delays.again_ns)
        return TrainerParts(port=port, cached=port.cached)

    def learner(self, site: Site) -> Learner:
        return SimulatedLearner()

    def engine(self, site: Site, plan: WorkerPlan) -> Engine:
        return SimulatedEngine(
            slots=plan.slots,
            context_tokens=plan.context_tokens,
            max_resident_versions=plan.versions,
            lengths=self.lengths,
            clock=site.clock,
        )

    def agents(self, site: Site) -> Agents | None:
        return None

    def tasks(self, site: Site, agents: Agents | None) -> SimTasks:
        delay_ns = self.delays.of_task
        return SimTasks(site.clock, answer=self.answer, delay_ns=delay_ns, agents=agents)

    def worker_ports(
        self, site: Site, tasks: SimPort, agents: Agents | None, engine: SimPort
    ) -> WorkerPorts:
        """Return a worker's ports around these."""
        clock, delays = site.clock, self.delays
        records = RecordPort(site.open_bus(), site.topics, site.meter, clock=clock, in_thread=False)
        handover = HandoverPort(self.handover, in_thread=False)
        return WorkerPorts(
            tasks=tasks,
            sessions=agents,
            records=_paced(records, clock, delays.progress_ns, delays.progress_ns),
            handover=_paced(handover, clock, delays.handover_ns, 0),
            engine=engine,
        )

    def _engine_port(self, site: Site, engine: Engine, plan: WorkerPlan) -> SimPort:
        inner = EnginePort(
            engine,
            site.store.weights,
            verify=site.store.verify,
            clock=site.clock,
            in_thread=False,
            steps_max=self.steps_max,
        )
        return PacedPort(
            inner,
            site.clock,
            delay_ns=lambda effect: plan.load_ns if isinstance(effect, LoadWeights) else 0,
            again_ns=lambda: self.steps_max * self.step_ns(engine, plan),
        )

    def step_ns(self, engine: Engine, plan: WorkerPlan) -> int:
        return plan.token_ns

    def work_ns(self, effect: Any) -> int:
        delays = self.delays
        return {
            Restore: delays.restore_ns,
            FetchBatch: delays.fetch_ns,
            TrainPart: delays.train_ns,
            TrainStep: delays.train_ns,
            PublishPolicy: delays.publish_ns,
            DropFiles: 0,
            WriteHistory: 0,
        }[type(effect)]
