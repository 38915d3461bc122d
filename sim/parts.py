"""What a world is made of beside the machines; decides what the plain simulated parts are.

`Parts` is the place to plug in another engine, trainer, codec, task or length of things: it is
asked once per incarnation for the ports of a worker or of the trainer, and gets a `Site` that says
who asks. `PlainParts` has production's ports (engine, tasks, codec, progress, training) in virtual
time, with `SimulatedEngine` and `SimulatedLearner` behind them, and a task without processes. A
port of a world says by `due_ns` when it has something to report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from dora_pipe.bus.port import Bus
from dora_pipe.config.model import Config
from dora_pipe.consumers.learners.port import Learner
from dora_pipe.consumers.learners.simulated import SimulatedLearner, initial_weights
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.effect_handlers import EFFECTS, EffectHandlers
from dora_pipe.consumers.trainer.effects import (
    DropFiles,
    FetchBatch,
    PublishPolicy,
    Restore,
    TrainPart,
    TrainStep,
)
from dora_pipe.consumers.trainer.ports import InlinePort
from dora_pipe.consumers.trainer.role import handlers_setup
from dora_pipe.consumers.trainer.status import Gauges
from dora_pipe.core.clock import Clock
from dora_pipe.core.runtime import Meter, Port
from dora_pipe.orchestrator.rows import RowStats
from dora_pipe.producers.engines.port import Engine
from dora_pipe.producers.engines.simulated import (
    END_TOKEN,
    Lengths,
    SimulatedEngine,
    long_tailed_length,
)
from dora_pipe.producers.sessions.addresses import Addresses
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
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import LoadWeights
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.kv_handover import Handover, MemoryHandover
from dora_pipe.producers.worker.ports import CodecPort, HandoverPort, TaskPort
from dora_pipe.producers.worker.resume import ProgressPort
from dora_pipe.producers.worker.scoring import GroupPort
from dora_pipe.schemas.control import DataSet, RunStarted
from dora_pipe.schemas.metrics import Cost, FailingPlace
from dora_pipe.schemas.policy import Manifest
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex
from dora_pipe.sim.agents import Agents
from dora_pipe.sim.paced_port import PacedPort, PublishingPort, WorkingPort
from dora_pipe.sim.role import NEVER_NS, SimPort
from dora_pipe.store.store import PolicyStore

MS: Final = 1_000_000
"""ns of a millisecond."""

CONTEXT_TOKENS: Final = 256
"""Of every worker."""

_UNTIMED: Final = nullcontext()


class StillMeter(Meter):
    """Costs are real time, which must not enter a world: here nothing costs anything."""

    def __init__(self) -> None:
        self._none = Cost(total_s=0.0, bus_s=0.0, control_s=0.0, codec_s=0.0, rss_bytes=0)

    def spend(self, name: str) -> AbstractContextManager[None]:
        """No clock is looked at."""
        return _UNTIMED

    def add(self, name: str, seconds: float) -> None:
        """Nothing is booked."""

    def cost(self) -> Cost:
        """Nothing."""
        return self._none


class Numbers:
    """A tokenizer without files: text is token ids in decimal."""

    def prompt_ids(self, text: str) -> list[int]:
        return self.ids(text)

    def ids(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def check_unrendered(self, text: str) -> None:
        """Accept every text."""


class SimTasks:
    """A task pool without processes: every call is answered by `answer`, after `delay_ns` of it.

    Calls of an episode end with its `EnvStep`s as `answer` says. What is forgotten is not answered.
    Agents run in `agents`.
    """

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
        """Whether an answer is due."""
        return self._clock.now_ns() >= self._due_ns

    def due_ns(self) -> int:
        """When the next answer is due."""
        return self._due_ns

    def start(self, effect: TaskCall | Forget) -> None:
        """Take a call, or forget one."""
        if isinstance(effect, Forget):
            self._forget(effect.request)
            return
        if isinstance(effect, PromptCall | AgentCall):
            self._forget(effect.request)
        assert effect.request not in self._calls, f"{effect.request} has a call already"
        if isinstance(effect, AgentCall):
            assert self._agents is not None, "agents run nowhere here"
            self._agents.begin(effect)
            return
        due_ns = self._clock.now_ns() + self._delay_ns(effect)
        self._calls[effect.request] = due_ns, effect
        self._due_ns = min(self._due_ns, due_ns)

    def poll(self) -> Sequence[TaskEvent]:
        """The answers that are due, in the order of the calls."""
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
        """A process dies, and with it all its episodes and agents; whether it had any."""
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
        """Forget everything."""
        self._calls.clear()
        self._lost.clear()
        self._due_ns = NEVER_NS

    def _forget(self, request: str) -> None:
        self._episodes.pop(request, None)
        self._lost = [one for one in self._lost if one.request != request]
        if self._agents is not None:
            self._agents.forget(request)
        if self._calls.pop(request, None) is not None:
            self._settle()

    def _settle(self) -> None:
        due_ns = min((due_ns for due_ns, _ in self._calls.values()), default=NEVER_NS)
        self._due_ns = self._clock.now_ns() if self._lost else due_ns


def prompt_of(call: PromptCall, *, episode: bool = False, replayable: bool = False) -> PromptReady:
    """A prompt of three to six tokens that tells the row."""
    row = call.index
    words = [3 + row % 89, 4 + row // 89 % 89, 5 + row % 7]
    text = " ".join(map(str, words + words[: row % 4]))
    return PromptReady(request=call.request, text=text, episode=episode, replayable=replayable)


def observed_of(call: EnvStep, *, done: bool, text: str = "8 9") -> EnvObserved:
    """What a tool says."""
    return EnvObserved(request=call.request, text=text, done=done, tool="tool", ok=True)


ADDRESSES: Final = Addresses(host="sim", port=1, secret=b"sim")
"""What agents are told; none of them uses it."""


class TimedTaskPort:
    """Production's task port on `SimTasks`, with its due time."""

    def __init__(self, inner: Port, tasks: SimTasks) -> None:
        self.lose = tasks.lose
        self.effects = inner.effects
        self.start = inner.start
        self.poll = inner.poll
        self.close = inner.close
        self._tasks = tasks

    @property
    def busy(self) -> bool:
        """Whether an answer is due."""
        return self._tasks.busy

    def due_ns(self) -> int:
        return self._tasks.due_ns()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlan:
    """A worker that a world has. Example: ``WorkerPlan(name="w0", slots=8, prefetch=2)``."""

    name: str
    slots: int
    prefetch: int
    context_tokens: int = CONTEXT_TOKENS
    token_ns: int = 2 * MS
    """One step of its engine, whatever runs in it."""
    load_ns: int = 200 * MS
    """Loading the weights of a version."""
    rate: float = 1.0
    """Of its monotonic clock."""
    versions: int = 1
    """How many its engine hosts at once."""
    elastic: bool = False
    """It shares its GPUs with the trainer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An incarnation that starts, and what it may use."""

    name: str
    number: int
    """Of the incarnation, among all of the run."""
    topics: Topics
    config: Config
    clock: Clock
    meter: Meter
    chance: Random
    """Its own."""
    store: PolicyStore
    bus: Bus
    """Of its loop."""
    open_bus: Callable[[], Bus]
    """Another bus of this incarnation."""
    run_started: RunStarted


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """Ports of a worker incarnation in the order in which they are polled, and its engine.

    In a world every port is a `SimPort`.
    """

    ports: Sequence[Any]
    engine: Engine
    single_turn: bool = True
    """Whether requests have no episodes, or only such as can be told again (a task port answers
    with `PromptReady(episode=True, replayable=True)`); only then they move. Such an episode goes on
    by the effects that all others have: `FetchProgress`, `PromptCall`, then `EnvStep` once more for
    every recorded turn, which must be answered as before (`worker.episodes`)."""
    stop_ids: tuple[int, ...] = (END_TOKEN,)
    failing: Callable[[], tuple[FailingPlace, ...]] = tuple
    """Places of tasks that fail, as they are now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerParts:
    """Ports of a trainer incarnation."""

    ports: Sequence[Any]
    cached: Callable[[], Gauges] = lambda: Gauges(0, 0)


class Parts(Protocol):
    """See the head of this file."""

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """Version 0 and the digest of the assets, both in the store."""
        ...

    def data(self, config: Config) -> Mapping[str, DataSet]:
        """The rows of every source; empty: some that nobody reads."""
        ...

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        """The ports of a worker incarnation."""
        ...

    def trainer(self, site: Site, history: CommitHistory) -> TrainerParts:
        """The ports of a trainer incarnation; `history` is what control says at its start."""
        ...


def episode_of(request: str) -> str:
    """Whose environment and reward a request has: those of its trajectory, whatever the attempt, a
    continuation of it too. Example: ``episode_of("g0000000042-003.18.1/2")``."""
    return request.partition("/")[0].partition(".")[0]


def text_digest(call: RewardCall) -> int:
    """A number by the text and whose it is."""
    return int(sha256_hex(call.text.encode(), episode_of(call.request).encode())[:8], 16)


def reward_of(call: RewardCall) -> Rewarded:
    """0 or 1 by a digest of the text."""
    value = float(text_digest(call) % 2)
    return Rewarded(request=call.request, reward=value, raw=value, parts={"exact": value})


def group_rewards_of(call: GroupCall) -> GroupRewarded:
    """Each sibling gets its share of the place that its text has among all: 0 for the first."""
    texts = sorted(one.text for one in call.completions)
    rewards = tuple(texts.index(one.text) / len(texts) for one in call.completions)
    return GroupRewarded(
        request=call.request, rewards=rewards, parts=tuple({"place": one} for one in rewards)
    )


def weights(rows: Sequence[RowStats], version: int) -> list[float]:
    """A sampler: it depends on everything that one is given."""
    return [(1 + version % 3) * row.mean + 1 / (1 + row.groups) for row in rows]


def answer_of(call: TaskCall) -> TaskEvent:
    """One turn, a reward by the text."""
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
    """How long things take that are not the engine's; ns."""

    task_ns: int = 5 * MS
    """A prompt, or a turn or reward of a task that is quick."""
    slow_ns: int = 0
    """What a tool's turn and a judge's reward take beyond that."""
    codec_ns: int = 1 * MS
    progress_ns: int = 2 * MS
    handover_ns: int = 4 * MS
    restore_ns: int = 50 * MS
    fetch_ns: int = 20 * MS
    train_ns: int = 300 * MS
    publish_ns: int = 30 * MS
    again_ns: int = 5 * MS
    """From one step of the trainer's work to its next."""

    def of_task(self, call: TaskCall) -> int:
        """How long a call takes."""
        return self.task_ns + (0 if isinstance(call, PromptCall) else self.slow_ns)


def _paced(port: Port, clock: Clock, delay_ns: int, again_ns: int) -> SimPort:
    return PacedPort(port, clock, delay_ns=lambda effect: delay_ns, again_ns=lambda: again_ns)


@dataclass(frozen=True, kw_only=True)
class PlainParts:
    """See the head of this file; `steps_max` engine steps make one event of the world."""

    lengths: Lengths = long_tailed_length
    delays: Delays = field(default_factory=Delays)
    steps_max: int = 8
    answer: Callable[[TaskCall], TaskEvent] = answer_of
    handover: Handover = field(default_factory=MemoryHandover)
    """Shared by all workers: they run on one machine."""

    @property
    def single_turn(self) -> bool:
        return True

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """A policy of 32 bytes."""
        assets = directory / "config.json"
        assets.write_text(json.dumps({"model_type": "simulated"}))
        digest = store.publish_assets([assets])
        return store.publish_weights(initial_weights), digest

    def data(self, config: Config) -> Mapping[str, DataSet]:
        """None that anybody reads."""
        return {}

    def worker(self, site: Site, plan: WorkerPlan) -> WorkerParts:
        """Production's ports, paced."""
        engine = self.engine(site, plan)
        agents = self.agents(site)
        tasks = self.tasks(site, agents)
        return WorkerParts(
            ports=[
                TimedTaskPort(TaskPort(tasks, Numbers(), addresses=ADDRESSES), tasks),
                *([] if agents is None else [agents]),
                *self._records(site),
                self._engine_port(site, engine, plan),
            ],
            engine=engine,
            single_turn=self.single_turn,
        )

    def trainer(self, site: Site, history: CommitHistory) -> TrainerParts:
        """Production's work, effect by effect."""
        handlers = EffectHandlers(
            handlers_setup(site.topics, site.run_started, site.config, history, adopt=False),
            bus=site.open_bus(),
            store=site.store,
            make_learner=lambda: self.learner(site),
            clock=site.clock,
            meter=site.meter,
        )
        work = InlinePort(handlers, tuple(one for one in EFFECTS if one is not PublishPolicy))
        return TrainerParts(ports=self._in_two(site, handlers, work), cached=work.cached)

    def _in_two(self, site: Site, handlers: EffectHandlers, work: InlinePort) -> list[SimPort]:
        """The trainer's work; a policy is published beside it, as in production."""
        again_ns = self.delays.again_ns
        publishing = PublishingPort(
            InlinePort(handlers, (PublishPolicy,)), site.clock, self.work_ns, again_ns
        )
        return [WorkingPort(work, site.clock, self.work_ns, again_ns, publishing), publishing]

    def learner(self, site: Site) -> Learner:
        """The trainer's."""
        return SimulatedLearner()

    def engine(self, site: Site, plan: WorkerPlan) -> Engine:
        return SimulatedEngine(
            slots=plan.slots,
            context_tokens=plan.context_tokens,
            versions_resident=plan.versions,
            lengths=self.lengths,
            clock=site.clock,
        )

    def agents(self, site: Site) -> Agents | None:
        """The agents of a worker, and its endpoint; None where the run has none."""
        return None

    def tasks(self, site: Site, agents: Agents | None) -> SimTasks:
        """The task pool of a worker."""
        delay_ns = self.delays.of_task
        return SimTasks(site.clock, answer=self.answer, delay_ns=delay_ns, agents=agents)

    def _records(self, site: Site) -> list[SimPort]:
        """The ports of a worker that code records, and read and write them."""
        topics, meter, clock, delays = site.topics, site.meter, site.clock, self.delays
        groups = GroupPort(site.open_bus(), topics.trajectories, topics.run, meter, clock=clock)
        progress = ProgressPort(site.open_bus(), topics.progress, meter, clock=clock)
        return [
            _paced(CodecPort(meter, clock=clock), clock, delays.codec_ns, delays.codec_ns),
            _paced(progress, clock, delays.progress_ns, delays.progress_ns),
            _paced(groups, clock, delays.progress_ns, delays.progress_ns),
            _paced(HandoverPort(self.handover, in_thread=False), clock, delays.handover_ns, 0),
        ]

    def _engine_port(self, site: Site, engine: Engine, plan: WorkerPlan) -> SimPort:
        inner = EnginePort(
            engine,
            site.store.weights,
            verify=site.store.verify,
            fallbacks=site.store.fallbacks.take,
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
        """How long one step of the engine takes with what is in it now."""
        return plan.token_ns

    def work_ns(self, effect: Any) -> int:
        """How long an effect of the trainer takes."""
        delays = self.delays
        return {
            Restore: delays.restore_ns,
            FetchBatch: delays.fetch_ns,
            TrainPart: delays.train_ns,
            TrainStep: delays.train_ns,
            PublishPolicy: delays.publish_ns,
            DropFiles: 0,
        }[type(effect)]
