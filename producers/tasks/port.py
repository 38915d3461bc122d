"""The port of a task: rows of data, an environment for several turns, a reward; decides nothing.

A `Task` runs in its own process (see `pool`), away from the engine: what raises, hangs or dies
there makes an invalid trajectory with its error, never a reward of 0. Users write this class.

Example::

    class Square(Task):
        def rows(self, split): return [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in ...]
        def prompt(self, row): return row["prompt"]
        def reward(self, row, text, turns): return float(text.strip() == row["answer"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Row = Mapping[str, Any]
"""One row of a data set: plain JSON values."""

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score with its parts. A plain number is taken as `Reward(value=number)`."""

    value: float
    raw: float | None = None
    """Before shaping, where the task shapes."""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to a model's turn: text for the context, and whether it is done."""

    text: str
    done: bool
    tool: str = ""
    """Name of the tool that answered; empty for the environment itself."""
    ok: bool = True


class Environment:
    """One episode: `reset` once, then `step` after every turn of the model."""

    def reset(self, row: Row) -> str:
        """The first prompt of the episode."""
        raise NotImplementedError

    def step(self, text: str) -> Observation:
        """Answer the model's turn `text`."""
        raise NotImplementedError


class Task:
    """Data, prompt, environment and reward of what is learnt."""

    def rows(self, split: Split) -> Sequence[Row]:
        """All rows of a split; the same ones in every process (their digest is checked)."""
        raise NotImplementedError

    def prompt(self, row: Row) -> str:
        """The prompt of a single-turn row, as text for the tokenizer."""
        raise NotImplementedError

    def environment(self, row: Row) -> Environment | None:
        """An environment for several turns; None (the default) for a single turn."""
        return None

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float | Reward:
        """Score a finished trajectory: `text` is the last model turn, `turns` every segment's text."""
        raise NotImplementedError

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]]:
        """(prompt, answer) pairs for a supervised warm start; only where the task can make them."""
        raise NotImplementedError
