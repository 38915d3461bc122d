"""Tasks and episodes for tests of third-party environments."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from dora_pipe.config import model
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.task import Environment, Observation, Prompt, Row, Task


def installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def task_of(kind: str, *, chat: bool = False, **options: Any) -> Task:
    task = open_task(model.Task(kind=kind, options=options, chat=chat))
    task.check()
    return task


def played(task: Task, row: Row, turns: Sequence[str]) -> tuple[Prompt, list[Observation], Any]:
    world = opened(task, row)
    prompt = world.reset(row)
    steps = [world.step(turn) for turn in turns]
    reward = world.reward(turns[-1] if turns else "", turns)
    world.close()
    return prompt, steps, reward


def opened(task: Task, row: Row) -> Environment:
    world = task.environment(row)
    assert world is not None
    return world
