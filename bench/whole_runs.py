"""Whole runs that a bench makes: where they lie, what they start from. It decides nothing."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import typer

from dora_pipe.cli.demo import TASK, warm
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.launch.examples import example_config
from dora_pipe.launch.plan import Plan
from dora_pipe.launch.run import supervise

LINES_KEPT: Final = 12
"""Of what a run said, shown when it fails."""


def run_whole(plan: Plan) -> None:
    """A run of a bench, which says nothing unless it fails: then what it said last."""
    lines: list[str] = []

    def tell_the_last() -> None:
        for line in lines[-LINES_KEPT:]:
            say(line)

    with ExitStack() as failing:
        failing.callback(tell_the_last)
        if not supervise(plan, report=lines.append):
            raise typer.Exit(130)
        failing.pop_all()


def warm_start(start: Path, task: str = TASK) -> Path:
    """The configuration of a new folder, and beside it the model that every run starts from.
    Raises UsageError for a folder that is there."""
    if start.exists():
        raise UsageError(f"{start} exists", hint="--keep takes a folder of its own")
    start.mkdir(parents=True)
    config = start / "demo.toml"
    config.write_text(example_config(task))
    warm(start, task)
    return config


@contextmanager
def bench_place(keep: Path | None) -> Iterator[Path]:
    """Where runs of a bench go: a folder that stays, or one that is removed afterwards."""
    if keep is not None:
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        yield Path(folder)
