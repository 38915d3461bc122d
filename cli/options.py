"""Arguments, options and defaults that commands share.

Imports no other part, for speed; a test compares the values with the parts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS_VARIABLE

TORCH: Final = "torch"

SFT_STEPS: Final = 240
SFT_BATCH: Final = 64
SFT_LEARNING_RATE: Final = 2e-3
SFT_SEED: Final = 3
SFT_WARMUP: Final = 20
SCHEDULES: Final = ("constant", "linear", "cosine")
SFT_STEPS_OF: Final = {"arithmetic": SFT_STEPS, "calculator": 200}
"""The policy then solves part of the task and can still improve."""

EXAMPLES: Final = tuple(SFT_STEPS_OF)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="DIR", envvar=RUNS_VARIABLE, help="Directory of runs.")
]
RUN_HELP: Final = "A run's name, the path of its directory, a .sqlite file, or kafka://.../RUN."
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help=RUN_HELP)]
ConfigArgument = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A TOML file, or the directory of a run.")
]
OverrideOption = Annotated[
    list[str] | None,
    typer.Option(
        *("-o", "--override"),
        metavar="KEY=VALUE",
        help="Value of a configuration key, such as run.steps=20; repeatable.",
    ),
]
FORCE_HINT: Final = "choose another, or overwrite it with --force"
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


def may_write_file(target: Path, *, force: bool) -> None:
    """Raise UsageError for a folder, and for an existing file unless `force`."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="name a file")
    if target.exists() and not force:
        raise UsageError(f"{target} exists", hint=FORCE_HINT)


def may_write_folder(target: Path, *, force: bool) -> None:
    """Raise UsageError for a file, and for a nonempty folder unless `force`."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", hint="name a folder")
    if target.exists() and any(target.iterdir()) and not force:
        raise UsageError(f"{target} is not empty", hint=FORCE_HINT)
