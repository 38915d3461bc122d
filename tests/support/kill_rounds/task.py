"""Task of kill rounds: a random policy earns varying rewards, so weights change."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from dora_pipe.producers.tasks.arithmetic import Arithmetic
from dora_pipe.producers.tasks.task import Completion, Row


class DigitShare(Arithmetic):
    """Prompts of `arithmetic`; the reward is the share of digits among the answer's words."""

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        return _share(text)


class JudgedDigits(DigitShare):
    """Slow judge of `judge_s` seconds with the same reward."""

    def __init__(self, judge_s: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self._judge_s = judge_s

    async def reward(  # type: ignore[override]
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float:
        await asyncio.sleep(self._judge_s)
        return _share(text)


def _share(text: str) -> float:
    words = text.split()
    return sum(word.isdigit() for word in words) / max(1, len(words))


class Ranked(DigitShare):
    """Same reward, with a bonus for shorter answers in a group."""

    def score_group(self, row: Row, completions: Sequence[Completion]) -> Sequence[float]:
        lengths = sorted((len(completion.text) for completion in completions), reverse=True)
        return [
            0.2 * lengths.index(len(completion.text)) / len(lengths) for completion in completions
        ]
