"""The task of the kill rounds: a random policy earns different rewards, so that weights move."""

from __future__ import annotations

from collections.abc import Sequence

from dora_pipe.producers.tasks.arithmetic import Arithmetic
from dora_pipe.producers.tasks.port import Row


class DigitShare(Arithmetic):
    """Prompts of `arithmetic`; the reward is the share of digits among the words of the answer."""

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Between 0 and 1; see Task."""
        words = text.split()
        return sum(word.isdigit() for word in words) / max(1, len(words))
