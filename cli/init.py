"""`init` makes a folder to start from, `sft` warms a model up on demonstrations or a JSONL file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

from dora_pipe.config.model import Config
from dora_pipe.core.console import say
from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.registry import open_task

PROGRESS_EVERY: Final = 40
"""Steps between two lines of talk."""


def warm_up(
    model: Path,
    rows: Sequence[tuple[str, str]] | Path,
    out: Path,
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
    threads: int,
    special_tokens: Literal["text", "parse"] = "text",
) -> None:
    """Train and say how it goes. Raises PolicyError, TaskError, UsageError."""
    from dora_pipe.consumers.learners.sft import train_sft
    from dora_pipe.producers.worker.tokenizer import Tokenizer

    def progress(step: int, loss: float) -> None:
        if step % PROGRESS_EVERY == 0 or step == steps:
            say(f"sft step {step:>4} of {steps}  loss {loss:.3f}")

    train_sft(
        model,
        rows,
        out,
        tokenizer=Tokenizer(model, special_tokens=special_tokens),
        steps=steps,
        batch=batch,
        learning_rate=learning_rate,
        seed=seed,
        threads=threads,
        progress=progress,
    )


def demonstrations(config: Config, *, seed: int, count: int) -> Sequence[tuple[str, str]]:
    """(prompt, answer) pairs of the configuration's task. Raises TaskError if it makes none."""
    sys.path.insert(0, config.task.directory)
    try:
        return open_task(config.task).demonstrations(seed, count)
    except NotImplementedError:
        raise TaskError(
            f"task {config.task.kind} makes no demonstrations", hint="give them with --data"
        ) from None
    finally:
        sys.path.remove(config.task.directory)
