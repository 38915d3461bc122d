"""Command of the demo."""

from __future__ import annotations

from typing import Annotated

import typer

from dora_pipe.cli.options import TORCH, OverrideOption, RunsOption
from dora_pipe.core.system.console import RUNS


def demo(
    root: RunsOption = RUNS,
    engine: Annotated[str, typer.Option(help="torch or vllm.")] = TORCH,
    override: OverrideOption = None,
) -> None:
    """Warm up, train with several policy versions at once, kill a worker, audit, replay."""
    from dora_pipe.cli.demo import run_demo

    run_demo(root, engine, override or ())
