"""`bench faults`: kill rounds of real roles."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import typer

import dora_pipe

app = typer.Typer(add_completion=False)

PASSED_ON: Final = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}
"""Forward all arguments to the program."""


@app.command(context_settings=PASSED_ON)
def faults(context: typer.Context) -> None:
    """Kill roles with SIGKILL at random and chosen moments; exit with 5 unless all checks pass."""
    root = str(Path(dora_pipe.__file__).resolve().parent)
    paths = [root, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    command = [sys.executable, "-m", "tests.support.kill_rounds.series", *context.args]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    raise typer.Exit(subprocess.call(command, env=variables))
