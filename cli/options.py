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

REWARD_MIN: Final = 0.85

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
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite existing files.")]


def may_write(target: Path, *, force: bool = False) -> None:
    """Raise UsageError if a file or a nonempty folder exists.

    `force` allows replacing files, but never a file by a folder or vice versa.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        what = "is not empty" if target.is_dir() else "exists"
        raise UsageError(f"{target} {what}", hint="choose another, or overwrite it with --force")


def may_write_file(target: Path, *, force: bool = False) -> None:
    """Check the path of a file, as `may_write`."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="name a file")
    may_write(target, force=force)


def may_write_folder(target: Path, *, force: bool = False) -> None:
    """Check the path of a folder, as `may_write`."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", hint="name a folder")
    may_write(target, force=force)
