"""Environments whose answers follow from their row and from what they were told, for tests of
episodes that go on elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import msgspec

from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    PromptReady,
    RewardCall,
    Rewarded,
    TaskCall,
    TaskEvent,
)
from tests.support.inline_tasks import InlineTasks


@dataclass
class Games(InlineTasks):
    """Episodes of a few turns, with tools, mistakes and empty answers, drawn from a seed.

    An environment lives from its prompt to its reward, or until it is lost or forgotten; a turn for
    one that is not there is a mistake of the worker.
    """

    seed: int = 0
    turns: int = 5
    """Of an episode, at most."""
    slip: int = 0
    """Environments answer as those with another one do not."""
    told: dict[str, list[str]] = field(default_factory=dict)
    """By request: what its environment has been told."""

    def __post_init__(self) -> None:
        self.episodes = self.replayable = True
        self.step, self.reward = self._respond, self._score

    def start(self, effect: TaskCall | Forget) -> None:
        if isinstance(effect, PromptCall):
            self.told[effect.request] = []
        elif isinstance(effect, Forget):
            self.told.pop(effect.request, None)
        super().start(effect)

    def lose(self, request: str) -> None:
        self.told.pop(request, None)
        super().lose(request)

    def _respond(self, call: EnvStep) -> TaskEvent:
        said = self.told[call.request]
        said.append(call.turn.text)
        name = call.request.partition("/")[0]
        chance = Random(f"{self.seed} {name} {said} {self.slip}")
        words = [str(chance.randrange(1, 60)) for _ in range(chance.choice([0, 1, 2, 5]))]
        return EnvObserved(
            request=call.request,
            text=" ".join(words),
            done=len(said) >= Random(f"{self.seed} {name}").randint(1, self.turns),
            tool=chance.choice(["", "calc"]),
            ok=chance.random() < 0.7,
        )

    def _score(self, call: RewardCall) -> TaskEvent:
        """By all that the environment was told, and by what is said to have happened."""
        said = self.told.pop(call.request)
        value = Random(f"{said} {call.turns}").random()
        return Rewarded(request=call.request, reward=value, raw=None, parts={"turns": len(said)})


@dataclass
class KeptGames(Games):
    """Games of a server that keeps episodes: who comes with a trajectory's name goes on with it."""

    server: dict[str, list[tuple[str, TaskEvent]]] = field(default_factory=dict)
    """By trajectory: the turns that its environment was told, and what it answered."""
    steps: list[tuple[str, int]] = field(default_factory=list)
    """Every step that was made: of which trajectory, the how manieth of its episode."""
    at: dict[str, int] = field(default_factory=dict)
    """By request: turns that it has told."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.replayable, self.prompt = False, self._begin

    def start(self, effect: TaskCall | Forget) -> None:
        super().start(effect)
        if isinstance(effect, Forget) and not effect.keep and effect.request in self.at:
            self.server.pop(effect.request.partition("/")[0], None)

    def _begin(self, call: PromptCall) -> TaskEvent:
        name = call.request.partition("/")[0]
        found = call.again and name in self.server
        if not found:
            self.server[name] = []
        self.at[call.request] = 0
        self.told[call.request] = []
        return PromptReady(request=call.request, text="5 6 7", episode=True, kept=True, found=found)

    def _respond(self, call: EnvStep) -> TaskEvent:
        name = call.request.partition("/")[0]
        told, at = self.server[name], self.at[call.request]
        self.at[call.request] += 1
        if at < len(told):
            said, event = told[at]
            assert said == call.turn.text
            self.told[call.request].append(said)
            return msgspec.structs.replace(event, request=call.request)
        event = super()._respond(call)
        told.append((call.turn.text, event))
        self.steps.append((name, at))
        return event

    def _score(self, call: RewardCall) -> TaskEvent:
        scored = super()._score(call)
        self.told[call.request] = [said for said, _ in self.server[call.request.partition("/")[0]]]
        return scored
