"""Parts whose calls fail as drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from dora_pipe.config.retention import full_every
from dora_pipe.consumers.learners.simulated import initial_weights
from dora_pipe.core.errors import InvariantBroken, PolicyError
from dora_pipe.producers.engines.engine import Kv, WeightsLoaded
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import (
    EnvStep,
    EpisodeLost,
    GroupCall,
    PromptCall,
    RewardCall,
    TaskCall,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.worker.kv_handover import KvLabel, MemoryHandover
from dora_pipe.schemas.policy import Blob, Manifest
from dora_pipe.sim.agents import AgentObserver, Agents
from dora_pipe.sim.fault_injector import FaultInjector
from dora_pipe.sim.faults import HANGING
from dora_pipe.sim.parts import (
    MS,
    Delays,
    PlainParts,
    SimTasks,
    Site,
    WorkerPlan,
    episode_of,
    group_rewards_of,
    observed_of,
    prompt_of,
    reward_of,
)
from dora_pipe.store.safetensors_file import read_manifest
from dora_pipe.store.store import PolicyStore
from dora_pipe.store.transfers.transfers import GONE, NO_ROOM, OTHER_DIGEST, Lost

HANG_NS: Final = 1500 * MS
TURNS_MEAN: Final = 2

ELEMENTS: Final = 64
"""Elements of a delta policy; a step changes one."""


@dataclass(frozen=True, kw_only=True)
class FaultyParts(PlainParts):
    """`PlainParts` whose calls fail until the injector ends."""

    injector: FaultInjector
    observer: AgentObserver | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "handover", _FaultyHandover(self.injector))

    @property
    def single_turn(self) -> bool:
        """Report whether requests may move: episodes must be replayable; agents restart."""
        scenario = self.injector.scenario
        if scenario.replayable:
            return True
        return not scenario.episodes or all(task.has_agent for task in scenario.config.tasks)

    def policy(self, store: PolicyStore, directory: Path) -> tuple[Manifest, str]:
        """Return a policy with small changes, for deltas."""
        manifest, assets = super().policy(store, directory)
        if full_every(self.injector.scenario.config, "float32") > 1:
            manifest = store.publish_weights(partial(initial_weights, sparse=ELEMENTS))
        return manifest, assets

    def agents(self, site: Site) -> Agents | None:
        scenario, injector = self.injector.scenario, self.injector
        if not any(task.has_agent for task in scenario.config.tasks):
            return None
        think_ns = self.delays.task_ns + self.delays.slow_ns
        return Agents(
            site.clock,
            seed=scenario.seed,
            incarnation=site.number,
            chance=site.chance,
            think_ns=lambda: int(think_ns * (0.5 + site.chance.random())),
            befalls=injector.befalls,
            hang_ns=injector.hang_ns,
            observer=self.observer,
        )

    def tasks(self, site: Site, agents: Agents | None) -> SimTasks:
        faulty = _FaultyTasks(self.injector, site, self.delays)
        return SimTasks(site.clock, answer=faulty.answer, delay_ns=faulty.delay_ns, agents=agents)

    def engine(self, site: Site, plan: WorkerPlan) -> SimulatedEngine:
        """Return an engine that may fail to load."""
        return _FaultyEngine(
            self.injector,
            slots=plan.slots,
            context_tokens=plan.context_tokens,
            max_resident_versions=plan.versions,
            lengths=self.lengths,
            clock=site.clock,
        )


class _FaultyTasks:
    def __init__(self, injector: FaultInjector, site: Site, delays: Delays) -> None:
        self._injector = injector
        self._chance = site.chance
        self._delays = delays
        self._failing: dict[str, str] = {}
        self._told: dict[str, list[str]] = {}
        """Messages to each environment, by request."""

    def delay_ns(self, call: TaskCall) -> int:
        if self._hangs(call):
            return self._injector.hang_ns()
        kind = self._kind(call)
        if kind and self._injector.befalls(kind):
            self._failing[call.request] = kind
            if kind == "reward-hangs":
                return HANG_NS
        return int(self._delays.of_task(call) * (0.5 + self._chance.random()))

    def _hangs(self, call: TaskCall) -> bool:
        return isinstance(call, EnvStep | RewardCall) and self._injector.befalls(HANGING)

    def answer(self, call: TaskCall) -> TaskEvent:
        kind, name = self._failing.pop(call.request, ""), call.request
        if kind in ("episode-lost", "retry"):
            what = "its process ended" if kind == "episode-lost" else "Retry: it is away"
            return EpisodeLost(request=name, message=what)
        if kind == "reward-hangs":
            return TaskFailed(request=name, error="TimedOut", message="timed out")
        if kind:
            return TaskFailed(request=name, error="ValueError", message="no number in it")
        if isinstance(call, PromptCall):
            scenario, self._told[name] = self._injector.scenario, []
            return prompt_of(call, episode=scenario.episodes, replayable=scenario.replayable)
        if isinstance(call, EnvStep) and self._injector.scenario.replayable:
            return self._say(call)
        if isinstance(call, EnvStep):
            return observed_of(call, done=self._chance.randrange(TURNS_MEAN) == 0)
        if isinstance(call, GroupCall):
            return group_rewards_of(call)
        assert isinstance(call, RewardCall), "agents are no calls of a pool"
        return reward_of(call)

    def _kind(self, call: TaskCall) -> str:
        if isinstance(call, PromptCall | EnvStep) and self._says_retry():
            return "retry"
        if isinstance(call, PromptCall):
            return "prompt-fails"
        if isinstance(call, EnvStep):
            return "episode-lost"
        return "reward-raises" if self._chance.random() < 0.5 else "reward-hangs"

    def _say(self, call: EnvStep) -> TaskEvent:
        texts = self._told[call.request]
        texts.append(call.turn.text)
        name = episode_of(call.request)
        chance = Random(f"environment {self._injector.scenario.seed} {name} {texts}")
        text = " ".join(str(chance.randrange(3, 96)) for _ in range(chance.randint(1, 3)))
        return observed_of(call, done=chance.randrange(TURNS_MEAN) == 0, text=text)

    def _says_retry(self) -> bool:
        return "retry" in self._injector.scenario.faults and self._chance.random() < 0.5


class _FaultyHandover(MemoryHandover):
    def __init__(self, injector: FaultInjector) -> None:
        super().__init__()
        self._injector = injector

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        if self._injector.befalls("handover-full"):
            return Lost(NO_ROOM)
        return super().put(label, kv)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        outcomes = [("handover-lost", GONE), ("handover-damaged", OTHER_DIGEST)]
        self._injector.chance.shuffle(outcomes)  # Otherwise lost caches are rarely damaged.
        for kind, why in outcomes:
            if self._injector.befalls(kind):
                return Lost(why)
        return super().fetch(label, blob)


class _FaultyEngine(SimulatedEngine):
    def __init__(self, injector: FaultInjector, **sizes: Any) -> None:
        super().__init__(**sizes)
        self._injector = injector

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        if self._injector.befalls("policy-unreadable"):
            raise PolicyError(f"no weights at {weights.name}")
        if read_manifest(weights).digest != digest:
            raise InvariantBroken(f"C1: other weights are loaded than those of version {version}")
        return super().load(weights, version=version, digest=digest)
