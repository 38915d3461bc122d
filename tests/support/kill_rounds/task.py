"""The task of the kill rounds: a random policy earns different rewards, so that weights move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dora_pipe.producers.tasks.arithmetic import Arithmetic
from dora_pipe.producers.tasks.port import Completion, Row


class DigitShare(Arithmetic):
    """Prompts of `arithmetic`; the reward is the share of digits among the words of the answer."""

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Between 0 and 1; see Task."""
        return _share(text)


class JudgedDigits(DigitShare):
    """The same, as a judge that takes `judge_s` would say it: others are sampled meanwhile."""

    def __init__(self, judge_s: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self._judge_s = judge_s

    async def reward(  # type: ignore[override]
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float:
        """After a while; see Task."""
        await asyncio.sleep(self._judge_s)
        return _share(text)


def _share(text: str) -> float:
    words = text.split()
    return sum(word.isdigit() for word in words) / max(1, len(words))


class Ranked(DigitShare):
    """The same, and a little more for what is shorter than its siblings."""

    def score_group(self, row: Row, completions: Sequence[Completion]) -> Sequence[float]:
        """Between 0 and 0.2; see Task."""
        lengths = sorted((len(one.text) for one in completions), reverse=True)
        return [0.2 * lengths.index(len(one.text)) / len(lengths) for one in completions]
