"""Task whose reward is replaced by `task.reward`."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.task import (
    Completion,
    Environment,
    Observation,
    Prompt,
    Reward,
    Row,
    Split,
    Task,
    Tool,
    Turn,
)


class OtherReward(Task):
    """`task`, scored by `rewards`, which receive the columns of its rows by name."""

    def __init__(self, task: Task, rewards: Rewards) -> None:
        self._task, self._rewards = task, rewards
        self.replayable = task.replayable

    @property
    def inner(self) -> Task:
        return self._task

    def rows(self, split: Split) -> Sequence[Row]:
        return self._task.rows(split)

    def check(self) -> None:
        self._task.check()

    def prompt(self, row: Row) -> Prompt:
        return self._task.prompt(row)

    def tools(self, row: Row) -> Sequence[Tool]:
        return self._task.tools(row)

    def environment(self, row: Row) -> Environment | None:
        found = self._task.environment(row)
        return None if found is None else _Unscored(found)

    def single_turn(self) -> bool:
        return self._task.single_turn()

    def reward(
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float | Reward | Awaitable[float | Reward]:
        return self.score(row, Completion(text=text, turns=turns))

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        return self._rewards.score(row, completion)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        return self._rewards.score_group(row, completions)

    def scores_groups(self) -> bool:
        return self._rewards.scores_groups

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        return self._task.demonstrations(seed, count)

    def reward_sources(self) -> Sequence[Any]:
        return (*self._rewards.sources(), type(self._task))

    def packages(self) -> Mapping[str, str]:
        return self._task.packages()


class _Unscored(Environment):
    def __init__(self, world: Environment) -> None:
        self._world = world

    def reset(self, row: Row) -> Prompt:
        return self._world.reset(row)

    def step(self, text: str) -> Observation:
        return self._world.step(text)

    def respond(self, turn: Turn) -> Observation | Awaitable[Observation]:
        return self._world.respond(turn)

    def close(self) -> None:
        return self._world.close()
