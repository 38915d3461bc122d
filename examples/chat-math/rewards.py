"""The second reward of this example: a user's own function in a user's own module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHARACTERS_MAX = 100
"""Characters from which an answer is not brief."""


def brevity(row: Mapping[str, Any], text: str) -> float:
    """From 0 to 1: the shorter, the better, for right answers only.

    A group of wrong answers would else be ranked by length alone, and GRPO divides advantages by
    the group's deviation: the policy would learn to say nothing.
    """
    right = f"\\boxed{{{row['answer']}}}" in text
    return max(0.0, 1.0 - len(text) / CHARACTERS_MAX) if right else 0.0
