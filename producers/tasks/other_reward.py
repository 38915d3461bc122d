"""Task whose reward is replaced by `task.reward`."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from dora_pipe.producers.rewards.registry import Rewards
from dora_pipe.producers.tasks.task import Completion, Environment, Reward, Row, Task

SAME = (
    "rows",
    "check",
    "prompt",
    "tools",
    "single_turn",
    "demonstrations",
    "packages",
    "shown_tools",
    "notes",
)


class OtherReward(Task):
    """`task`, scored by `rewards`, which receive the columns of its rows by name."""

    def __init__(self, task: Task, rewards: Rewards) -> None:
        self._task, self._rewards = task, rewards
        self.replayable = task.replayable
        for name in SAME:
            setattr(self, name, getattr(task, name))

    def environment(self, row: Row) -> Environment | None:
        world = self._task.environment(row)
        return None if world is None else _Unscored(world)

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        return self._rewards.score(row, completion)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        return self._rewards.score_group(row, completions)

    def scores_groups(self) -> bool:
        return self._rewards.scores_groups

    def reward_sources(self) -> Sequence[Any]:
        return (*self._rewards.sources(), type(self._task))


class _Unscored(Environment):
    def __init__(self, world: Environment) -> None:
        for name in ("reset", "step", "respond", "close"):
            setattr(self, name, getattr(world, name))
