"""A task and an engine that fail as often as a seed says; decides which call fails how."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.port import Kv, WeightsLoaded
from dora_pipe.producers.engines.simulated import SimulatedEngine
from dora_pipe.producers.tasks.calls import (
    EnvStep,
    EpisodeLost,
    PromptCall,
    TaskCall,
    TaskEvent,
    TaskFailed,
)
from dora_pipe.producers.worker.kv_handover import KvLabel, MemoryHandover
from dora_pipe.schemas.policy import Blob
from dora_pipe.sim.fault_injector import FaultInjector
from dora_pipe.sim.parts import MS, PlainParts, Site, WorkerPlan, reward_of
from dora_pipe.sim.ports import SimTasks, observed_of, prompt_of
from dora_pipe.store.transfers.port import GONE, NO_ROOM, OTHER_DIGEST, Lost

HANG_NS: Final = 1500 * MS
"""A reward's time limit."""

TURNS_MEAN: Final = 2


@dataclass(frozen=True, kw_only=True)
class FaultyParts(PlainParts):
    """`PlainParts` whose task and engine fail as the injector's seed says, until it is over."""

    injector: FaultInjector

    def __post_init__(self) -> None:
        object.__setattr__(self, "handover", _FaultyHandover(self.injector))

    @property
    def single_turn(self) -> bool:
        """See `PlainParts`."""
        return not self.injector.draw.episodes

    def tasks(self, site: Site) -> SimTasks:
        """A pool whose calls may raise, hang, or lose their episode."""
        bad = _FaultyTasks(self.injector, site, self.delays.task_ns)
        return SimTasks(site.clock, answer=bad.answer, delay_ns=bad.delay_ns)

    def engine(self, site: Site, plan: WorkerPlan) -> SimulatedEngine:
        """An engine that may not get its weights."""
        return _FaultyEngine(self, site, plan)


class _FaultyTasks:
    def __init__(self, injector: FaultInjector, site: Site, task_ns: int) -> None:
        self._storm = injector
        self._chance = site.chance
        self._task_ns = task_ns
        self._failing: dict[str, str] = {}

    def delay_ns(self, call: TaskCall) -> int:
        """How long this call takes; whether it fails is decided here."""
        kind = self._kind(call)
        if kind and self._storm.befalls(kind):
            self._failing[call.request] = kind
            if kind == "reward-hangs":
                return HANG_NS
        return int(self._task_ns * (0.5 + self._chance.random()))

    def answer(self, call: TaskCall) -> TaskEvent:
        """What comes of it."""
        kind, name = self._failing.pop(call.request, ""), call.request
        if kind == "episode-lost":
            return EpisodeLost(request=name, message="its process ended")
        if kind == "reward-hangs":
            return TaskFailed(request=name, error="TimedOut", message="timed out")
        if kind:
            return TaskFailed(request=name, error="ValueError", message="no number in it")
        if isinstance(call, PromptCall):
            return prompt_of(call, episode=self._storm.draw.episodes)
        if isinstance(call, EnvStep):
            return observed_of(call, done=self._chance.randrange(TURNS_MEAN) == 0)
        return reward_of(call)

    def _kind(self, call: TaskCall) -> str:
        """The fault that a call of its kind may have."""
        if isinstance(call, PromptCall):
            return "prompt-fails"
        if isinstance(call, EnvStep):
            return "episode-lost"
        return "reward-raises" if self._chance.random() < 0.5 else "reward-hangs"


class _FaultyHandover(MemoryHandover):
    """Caches get lost on their way, or are found to be damaged."""

    def __init__(self, injector: FaultInjector) -> None:
        super().__init__()
        self._storm = injector

    def put(self, label: KvLabel, kv: Kv) -> Blob | Lost:
        """See `Handover`."""
        if self._storm.befalls("handover-full"):
            return Lost(NO_ROOM)
        return super().put(label, kv)

    def fetch(self, label: KvLabel, blob: Blob) -> Kv | Lost:
        """See `Handover`."""
        if self._storm.befalls("handover-lost"):
            return Lost(GONE)
        if self._storm.befalls("handover-damaged"):
            return Lost(OTHER_DIGEST)
        return super().fetch(label, blob)


class _FaultyEngine(SimulatedEngine):
    def __init__(self, parts: FaultyParts, site: Site, plan: WorkerPlan) -> None:
        super().__init__(
            slots=plan.slots,
            context_tokens=plan.context_tokens,
            versions_resident=plan.versions,
            lengths=parts.lengths,
            clock=site.clock,
        )
        self._storm = parts.injector

    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        """See the port."""
        if self._storm.befalls("policy-unreadable"):
            raise PolicyError(f"no weights at {weights.name}")
        return super().load(weights, version=version, digest=digest)
