"""In-process task for commands that open the run's task."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dora_pipe.analysis import task as task_again
from dora_pipe.sim.parts import Numbers
from tests.support.inline_tasks import InlineTasks


class AssetsNumbers(Numbers):
    stop_ids = (0,)
    made: ClassVar[list[str]] = []
    """`special_tokens` of each opened tokenizer."""

    def __init__(self, assets: Path) -> None:
        assert assets.is_dir()

    def reading(self, special_tokens: str) -> AssetsNumbers:
        self.made.append(special_tokens)
        return self


class PoolTasks(InlineTasks):
    def __enter__(self) -> PoolTasks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def ask_here(monkeypatch: pytest.MonkeyPatch, pool: Callable[[Any], PoolTasks]) -> None:
    monkeypatch.setattr(task_again, "TaskPool", pool)
    monkeypatch.setattr(task_again, "Tokenizer", AssetsNumbers)
    monkeypatch.setattr(task_again, "check_data", lambda facts, run, sources: None)
