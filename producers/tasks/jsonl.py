"""Rows from JSONL files, and rewards by name: the built-in task `jsonl`.

Every line is an object with a string `prompt`; `answer` and further columns are there for the
rewards. Blank lines are skipped.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.producers.rewards.registry import Rewards, single
from dora_pipe.producers.tasks.port import Completion, Reward, Row, Split, Task
from dora_pipe.schemas.identity import derive_seed

_DECODER = msgspec.json.Decoder(dict[str, Any])


class JsonlTask(Task):
    """The built-in task `jsonl`.

    Example: ``JsonlTask(data="train.jsonl", reward="rewards:score")``. The reward's module is
    imported when it is first needed, so that rows can be read without running the user's code.
    """

    def __init__(
        self,
        *,
        data: str = "",
        eval_data: str = "",
        reward: str | Rewards = "",
        prompt_column: str = "prompt",
        answer_column: str = "answer",
    ) -> None:
        """`eval_data` may be empty: then there are no evaluation rows."""
        if not data:
            raise ConfigError("task.data: `jsonl` needs a file", hint="one JSON object per line")
        if not reward:
            raise ConfigError(
                "task.reward: `jsonl` needs a reward function", hint='for instance "rewards:score"'
            )
        self._paths: dict[Split, str] = {"train": data, "eval": eval_data}
        self._rewards = reward if isinstance(reward, Rewards) else single(reward)
        self._prompt, self._answer = prompt_column, answer_column

    def rows(self, split: Split) -> Sequence[Row]:
        """See Task. Raises TaskError naming the line that cannot be read."""
        path = self._paths[split]
        return read_jsonl(Path(path), self._prompt) if path else []

    def prompt(self, row: Row) -> str:
        """See Task."""
        return str(row[self._prompt])

    def reward(
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float | Reward | Awaitable[float | Reward]:
        """See Task."""
        return self.score(row, Completion(text=text, turns=turns))

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        """See Task."""
        return self._rewards.score(row, completion, answer_column=self._answer)

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]]:
        """Prompts and answers of the training data, in an order drawn from `seed`, again and again.

        Raises TaskError where a row has no answer.
        """
        pairs = [self._pair(place, row) for place, row in enumerate(self.rows("train"))]
        if not pairs:
            raise TaskError(f"{self._paths['train']}: has no rows")
        chance = random.Random(derive_seed("jsonl", "demonstrations", seed))
        chosen: list[tuple[str, str]] = []
        while len(chosen) < count:
            chosen += chance.sample(pairs, len(pairs))
        return chosen[:count]

    def reward_sources(self) -> Sequence[Any]:
        """Of the rewards, and this class."""
        return (*self._rewards.sources(), type(self))

    def _pair(self, place: int, row: Row) -> tuple[str, str]:
        answer = row.get(self._answer)
        if not isinstance(answer, str):
            raise TaskError(
                f"{self._paths['train']}: row {place} has no text in `{self._answer}`, so it is"
                " no demonstration"
            )
        return self.prompt(row), answer


def read_jsonl(path: Path, prompt_column: str = "prompt") -> list[Row]:
    """The rows of a JSONL file. Raises TaskError naming file and line."""
    rows: list[Row] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(path, number, line, prompt_column))
    except OSError as error:
        raise TaskError(f"{path}: {error.strerror}") from error
    return rows


def _row(path: Path, number: int, line: bytes, prompt_column: str) -> Row:
    try:
        row = _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"{path}, line {number}: {error}") from error
    if not isinstance(row.get(prompt_column), str):
        raise TaskError(
            f"{path}, line {number}: no text in `{prompt_column}`",
            hint=f"it has {', '.join(f'`{name}`' for name in row) or 'no columns'}",
        )
    return row
