"""In-process task pool and tokenizer for tests of the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dora_pipe.producers.tasks.calls import (
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


@dataclass
class InlineTasks:
    """Task pool whose answers are replaceable functions, delivered at the next poll; kinds in
    `held` wait."""

    episodes: bool = False
    replayable: bool = False
    prompt: Callable[[PromptCall], TaskEvent] | None = None
    step: Callable[[EnvStep], TaskEvent] | None = None
    reward: Callable[[RewardCall], TaskEvent] | None = None
    group: Callable[[GroupCall], TaskEvent] | None = None
    held: set[type] = field(default_factory=set)
    calls: list[TaskCall] = field(default_factory=list)
    seen: list[TaskCall] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)
    events: list[TaskEvent] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        return bool(self.events)

    def start(self, effect: TaskEffect) -> None:
        if isinstance(effect, Forget):
            self.forgotten.append(effect.request)
            self.calls = [call for call in self.calls if call.request != effect.request]
        else:
            self.calls.append(effect)
            self.seen.append(effect)

    def poll(self) -> Sequence[TaskEvent]:
        ready = [call for call in self.calls if type(call) not in self.held]
        self.calls = [call for call in self.calls if type(call) in self.held]
        events, self.events = self.events, []
        return events + [self._answer(call) for call in ready]

    def close(self) -> None:
        self.calls.clear()

    def lose(self, request: str) -> None:
        self.calls = [call for call in self.calls if call.request != request]
        self.events.append(EpisodeLost(request=request, message="its process ended: killed"))

    def _answer(self, call: TaskCall) -> TaskEvent:
        if isinstance(call, PromptCall):
            ready = PromptReady(
                request=call.request,
                text="5 6 7",
                episode=self.episodes,
                replayable=self.replayable,
            )
            return self.prompt(call) if self.prompt else ready
        if isinstance(call, EnvStep):
            done = EnvObserved(request=call.request, text="9 9", done=True, tool="", ok=True)
            return self.step(call) if self.step else done
        if isinstance(call, GroupCall):
            return self.group(call) if self.group else ranked(call)
        assert isinstance(call, RewardCall), "agents run nowhere here"
        scored = Rewarded(request=call.request, reward=1.0, raw=0.5, parts={"exact": 1.0})
        return self.reward(call) if self.reward else scored


def ranked(call: GroupCall) -> GroupRewarded:
    rewards = tuple(map(float, range(len(call.completions))))
    parts = tuple({"place": reward} for reward in rewards)
    return GroupRewarded(request=call.request, rewards=rewards, parts=parts)


def episode_tasks(last: int) -> InlineTasks:
    tasks = InlineTasks(episodes=True)

    def step(call: EnvStep) -> EnvObserved:
        turns = [request for request in tasks.seen if request.request == call.request]
        done = sum(isinstance(turn, EnvStep) for turn in turns) >= last
        return EnvObserved(request=call.request, text="8 9", done=done, tool="calc", ok=True)

    tasks.step = step
    return tasks


def failed(call: TaskCall, error: str = "ValueError", message: str = "no") -> TaskFailed:
    return TaskFailed(request=call.request, error=error, message=message)
