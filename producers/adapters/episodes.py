"""What environments of others have in common here: rows that are seeds, and a conversation that is
text, or messages of a user. Decides nothing of a game.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any, Final

from dora_pipe.core.errors import ConfigError
from dora_pipe.producers.tasks.port import Observation, Prompt, Row, Split, Task
from dora_pipe.schemas.identity import derive_seed

EVAL_SEED: Final = 999
"""Evaluation rows do not depend on `options.seed`: runs can be compared."""

SEED_BITS: Final = 31
"""Most packages take seeds as long as this."""


class SeededRandom:
    """A state of `random`, the generator that a whole process shares, for one episode alone.

    Example: ``with drawn: game.step(action)``; what is drawn inside follows from the seed and from
    what was drawn inside before. Of all threads one is inside at a time: nothing that waits for
    others belongs there.
    """

    _one = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._state = random.Random(seed).getstate()
        self._outside = self._state

    def __enter__(self) -> None:
        self._one.acquire()
        self._outside = random.getstate()
        random.setstate(self._state)

    def __exit__(self, *_: object) -> None:
        self._state = random.getstate()
        random.setstate(self._outside)
        self._one.release()


class PromptFormat:
    """How an environment's texts reach the model: as they are, or as messages.

    Example: ``PromptFormat(chat=True).first("a") == [{"role": "user", "content": "a"}]``.
    """

    def __init__(self, *, chat: bool = False, system_prompt: str = "") -> None:
        self.chat = chat or bool(system_prompt)
        self._system = system_prompt

    def first(self, text: str) -> Prompt:
        if not self.chat:
            return text
        system = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": text.strip("\n")}]

    def then(self, text: str, *, ok: bool = True) -> Observation:
        """What the model is told behind its turn; the episode goes on."""
        if not self.chat:
            return Observation(text=text, done=False, ok=ok)
        told = {"role": "user", "content": text.strip("\n")}
        return Observation(messages=[told], done=False, ok=ok)


class SeededTask(Task):
    """A task whose rows are seeds of episodes: ``{"seed": 1297450433}``."""

    def __init__(
        self, *, name: str, seed: int, count: int, eval_count: int, prompt_format: PromptFormat
    ) -> None:
        """`name`: what the seeds are drawn for. Raises ConfigError for counts that cannot be."""
        if count < 1 or eval_count < 0:
            counts = f"count {count} and eval_count {eval_count}"
            raise ConfigError(f"task.options: {counts} are no rows")
        self._name = name
        self._seeds: dict[Split, int] = {"train": seed, "eval": EVAL_SEED}
        self._counts: dict[Split, int] = {"train": count, "eval": eval_count}
        self.prompt_format = prompt_format

    def rows(self, split: Split) -> Sequence[Row]:
        drawn = (self._name, split, self._seeds[split])
        return [
            {"seed": derive_seed(*drawn, at) % 2**SEED_BITS} for at in range(self._counts[split])
        ]

    def single_turn(self) -> bool:
        return False

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Never asked: episodes score themselves."""
        raise NotImplementedError

    def reward_sources(self) -> Sequence[Any]:
        """Of this class, and which packages it plays with."""
        return (type(self), *(f"{name} {version}" for name, version in self.packages().items()))
