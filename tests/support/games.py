"""Deterministic environments for tests of moved episodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    RewardCall,
    Rewarded,
    TaskEffect,
    TaskEvent,
)
from tests.support.inline_tasks import InlineTasks


@dataclass
class Games(InlineTasks):
    """Episodes with tools, mistakes and empty answers, drawn from a seed. An environment exists
    from prompt to reward, or until lost; a turn without one is an error of the worker."""

    seed: int = 0
    turns: int = 5
    """Maximum turns."""
    slip: int = 0
    """Salt of the answers."""
    told: dict[str, list[str]] = field(default_factory=dict)
    """Texts received by each request's environment."""

    def __post_init__(self) -> None:
        self.episodes = self.replayable = True
        self.step, self.reward = self._respond, self._score

    def start(self, effect: TaskEffect) -> None:
        if isinstance(effect, PromptCall):
            self.told[effect.request] = []
        elif isinstance(effect, Forget):
            self.told.pop(effect.request, None)
        super().start(effect)

    def lose(self, request: str) -> None:
        self.told.pop(request, None)
        super().lose(request)

    def _respond(self, call: EnvStep) -> TaskEvent:
        turns = self.told[call.request]
        turns.append(call.turn.text)
        name = call.request.partition("/")[0]
        chance = Random(f"{self.seed} {name} {turns} {self.slip}")
        words = [str(chance.randrange(1, 60)) for _ in range(chance.choice([0, 1, 2, 5]))]
        return EnvObserved(
            request=call.request,
            text=" ".join(words),
            done=len(turns) >= Random(f"{self.seed} {name}").randint(1, self.turns),
            tool=chance.choice(["", "calc"]),
            ok=chance.random() < 0.7,
        )

    def _score(self, call: RewardCall) -> TaskEvent:
        turns = self.told.pop(call.request)
        value = Random(f"{turns} {call.completion.turns}").random()
        return Rewarded(request=call.request, reward=value, raw=None, parts={"turns": len(turns)})
