"""The reward of this example: a user's own function in a user's own module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_pipe.producers.tasks.task import Reward

EXACT_SHARE = 0.5
"""How much of the reward is for the whole answer; the rest is for letters in their place."""


def score(row: Mapping[str, Any], text: str) -> Reward:
    """1 for the right answer and nothing else; less for some of its letters in their place."""
    expected, answer = row["answer"], text.strip()
    right = sum(a == b for a, b in zip(expected, answer, strict=False))
    placed = right / max(len(expected), len(answer))
    exact = float(answer == expected)
    value = EXACT_SHARE * exact + (1 - EXACT_SHARE) * placed
    return Reward(value=value, raw=exact, parts={"exact": exact, "placed": placed})
