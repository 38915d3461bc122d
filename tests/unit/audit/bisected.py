"""A world for plans of `bisect`: what each version and trial is worth, drawn by fixed seeds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dora_pipe.audit.bisect import Ask, Plan, Subject, Values, carry_out

T = TypeVar("T")


@dataclass(slots=True)
class World:
    """Draw i is 1 where the i-th number is below what the subject is worth."""

    worth: Callable[[Subject], float]
    most: int = 100_000
    """Draws that there are."""
    asked: list[Ask] = field(default_factory=list)

    def values(self, ask: Ask) -> Values:
        """What a probe says."""
        self.asked.append(ask)
        numbers = random.Random(7)
        worth = self.worth(ask.subject)
        return [float(numbers.random() < worth) for _ in range(min(ask.draws, self.most))]

    def run(self, plan: Plan[T]) -> T:
        return carry_out(plan, self.values)

    @property
    def subjects(self) -> list[str]:
        """What was asked of, in order, each once."""
        return list(dict.fromkeys(ask.subject.words for ask in self.asked))
