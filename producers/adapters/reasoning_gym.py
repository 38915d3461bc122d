"""Generators of reasoning-gym as tasks: `reasoning-gym:basic_arithmetic`.

Scoring regenerates a row's `metadata` from its number and uses the generator's score.
"""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.adapters.episodes import PromptFormat, packages_of, required
from dora_pipe.producers.tasks.arithmetic import EVAL_SEED
from dora_pipe.producers.tasks.task import Prompt, Reward, Row, Split, Task
from dora_pipe.schemas.identity import derive_seed


class ReasoningGymTask(Task):
    """Task `reasoning-gym:NAME`."""

    def __init__(
        self,
        name: str,
        *,
        arguments: Mapping[str, Any] | None = None,
        tag: str = "answer",
        seed: int = 1,
        count: int = 1024,
        eval_count: int = 64,
        chat: bool = False,
        system_prompt: str = "",
    ) -> None:
        """Options are in docs/environments.md.

        The answer is the last ``<answer>`` element (`tag`), else the entire text. Raises
        ConfigError.
        """
        kind = f"reasoning-gym:{name}"
        self._utils = required(
            "reasoning_gym.utils", package="reasoning-gym", extra="reasoning-gym", kind=kind
        )
        package = sys.modules["reasoning_gym"]
        datasets = package.factory.DATASETS
        if name not in datasets:
            raise ConfigError(
                f"task.kind: `{kind}`: reasoning-gym has no `{name}`", hint=nearest(name, datasets)
            )
        self._kind, self._tag = kind, tag
        self._prompt_format = PromptFormat(chat=chat, system_prompt=system_prompt)
        given = dict(arguments or {})
        _check_arguments(kind, given, datasets[name][1])
        self._sets: dict[Split, Any] = {
            "train": _opened(package, kind, name, {**given, "seed": seed, "size": count}),
            "eval": _opened(
                package, kind, name, {**given, "seed": EVAL_SEED, "size": max(1, eval_count)}
            ),
        }
        self._counts: dict[Split, int] = {"train": count, "eval": eval_count}

    def rows(self, split: Split) -> Sequence[Row]:
        return [self._row(split, index) for index in range(self._counts[split])]

    def prompt(self, row: Row) -> Prompt:
        return self._prompt_format.first(str(row["question"]))

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> Reward:
        answer = self._utils.extract_answer(text, tag_name=self._tag) if self._tag else None
        answer = text.strip() if answer is None else answer
        score = self._sets[row["split"]].score_answer(
            answer=answer, entry=self._entry(row["split"], row["index"])
        )
        return Reward(value=float(score), answer=answer)

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """Return questions with their answers from row `seed` on. Raises ConfigError if none has
        one."""
        examples: list[Any] = []
        for step in range(self._counts["train"]):
            row = self._row("train", (seed + step) % self._counts["train"])
            if row["answer"] is None:
                continue
            answer = f"<{self._tag}>{row['answer']}</{self._tag}>" if self._tag else row["answer"]
            prompt = self.prompt(row)
            if isinstance(prompt, str):
                examples.append((prompt, answer))
            else:
                examples.append({"messages": [*prompt, {"role": "assistant", "content": answer}]})
            if len(examples) == count:
                return examples
        if not examples:
            raise ConfigError(f"{self._kind}: its questions have no answers")
        return [examples[index % len(examples)] for index in range(count)]

    def packages(self) -> Mapping[str, str]:
        return packages_of("reasoning_gym")

    def reward_sources(self) -> Sequence[Any]:
        return (type(self), *(f"{name} {version}" for name, version in self.packages().items()))

    def _entry(self, split: Split, index: int) -> Any:
        """Some generators draw from `random` regardless of their seed."""
        outside = random.getstate()
        random.seed(derive_seed(self._kind, split, index))
        try:
            return self._sets[split][index]
        finally:
            random.setstate(outside)

    def _row(self, split: Split, index: int) -> Row:
        entry = self._entry(split, index)
        answer = entry.get("answer")
        return {
            "question": str(entry["question"]),
            "answer": None if answer is None else str(answer),
            "split": split,
            "index": index,
        }


def _check_arguments(kind: str, given: Mapping[str, Any], form: type) -> None:
    names = {field.name for field in dataclasses.fields(form)} - {"seed", "size"}
    for name in given:
        if name not in names:
            raise ConfigError(
                f"task.options.arguments.{name}: `{kind}` has no such argument",
                hint=nearest(name, names) or f"it takes {', '.join(sorted(names))}",
            )


def _opened(package: Any, kind: str, name: str, arguments: Mapping[str, Any]) -> Any:
    """The package rejects values by assertions."""
    try:
        return package.create_dataset(name, **arguments)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(f"task.options.arguments: `{kind}`: {error}") from error
