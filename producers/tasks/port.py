"""The port of a task: rows of data, an environment for several turns, a reward; decides nothing.

A `Task` runs in its own process (see `pool`), away from the engine: what raises, hangs or dies
there makes an invalid trajectory with its error, never a reward of 0. Users write this class.

Texts of the model are decoded without special tokens, so a turn that ended at the tokenizer's
end-of-sequence token does not show it; what an environment says is encoded without them.

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
    """A score with its parts. A plain number is taken as `Reward(value=number)`.

    Example: ``Reward(value=0.9, raw=1.0, parts={"exact": 1.0, "length": -0.1})``.
    """

    value: float
    """Within `dora_pipe.schemas.wire.REWARD_MAX`: 1e6, positive or negative."""
    raw: float | None = None
    """Before shaping, where the task shapes."""
    parts: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to a model's turn: text for the context, and whether it is done.

    Example: ``Observation(text="result 42", done=False, tool="calculator")``.
    """

    text: str
    done: bool
    tool: str = ""
    """Name of the tool that answered; empty for the environment itself."""
    ok: bool = True


class Environment:
    """One episode: `reset` once, then `step` after every turn of the model, then `close`."""

    def reset(self, row: Row) -> str:
        """The first prompt of the episode."""
        raise NotImplementedError

    def step(self, text: str) -> Observation:
        """Answer the model's turn `text`."""
        raise NotImplementedError

    def reward(self, text: str, turns: Sequence[str]) -> float | Reward | None:
        """Score the finished episode from its state; None (the default) leaves it to the task."""
        return None

    def close(self) -> None:
        """Let go of what the episode holds. Not called when its process is killed."""


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
        """Score a finished trajectory: `text` is the last model turn, `turns` every segment's text.

        `turns` has no prompt in it: model turn, observation, model turn, ... in order.
        """
        raise NotImplementedError

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]]:
        """(prompt, answer) pairs for a supervised warm start; only where the task can make them.

        The end-of-sequence token is not part of an answer; who trains on it adds it.
        """
        raise NotImplementedError

    def reward_sources(self) -> Sequence[Any]:
        """Classes and functions whose modules decide the reward; their source is digested."""
        return (type(self),)
