"""What several commands take and show: arguments, options, defaults, and where they may write.

It imports nothing of the parts: what does the work says the same words, and a test compares them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.core.console import RUNS_VARIABLE
from dora_pipe.core.errors import UsageError

TORCH: Final = "torch"
"""The engine that needs nothing of a model but its family."""

SFT_STEPS: Final = 240
SFT_BATCH: Final = 64
SFT_LEARNING_RATE: Final = 2e-3
SFT_SEED: Final = 3
SFT_WARMUP: Final = 20
SCHEDULES: Final = ("constant", "linear", "cosine")
SFT_STEPS_OF: Final = {"arithmetic": SFT_STEPS, "calculator": 200}
"""Steps after which a policy gets a part of the task right, and has something left to learn."""

EXAMPLES: Final = tuple(SFT_STEPS_OF)

REWARD_MIN: Final = 0.85
"""The demo has failed when the last policy's evaluation reward is below."""

CLAIM_HOURS: Final = 1.0
"""Values that no record claims are older before `prune` names them: `audit.prune`."""

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="DIR", envvar=RUNS_VARIABLE, help="Where runs lie.")
]
RUN_HELP: Final = "A run's name, the path of its directory, a .sqlite file, or kafka://.../RUN."
RunArgument = Annotated[str, typer.Argument(help=RUN_HELP)]
ConfigArgument = Annotated[Path, typer.Argument(help="A TOML file, or the directory of a run.")]
OverrideOption = Annotated[
    list[str] | None, typer.Option("-o", "--override", help="key=value, e.g. -o run.steps=20")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Write over what is there.")]

RedactOption = Annotated[
    bool, typer.Option("--redact", help="Hide texts, token ids and messages of tasks.")
]


def may_write(target: Path, *, force: bool = False) -> None:
    """Raise UsageError where a file, or a folder with anything in it, is there already.

    With `force` a file is replaced when the new one is whole, and files of a folder that have the
    same names; others stay. A file is never replaced by a folder, nor the other way round.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not force:
        what = "holds something already" if target.is_dir() else "is there already"
        raise UsageError(f"{target} {what}", hint="name another, or --force writes over it")


def may_write_file(target: Path, *, force: bool = False) -> None:
    """The same for what will be a file."""
    if target.is_dir():
        raise UsageError(f"{target} is a folder", hint="name a file")
    may_write(target, force=force)


def may_write_folder(target: Path, *, force: bool = False) -> None:
    """The same for what will be a folder."""
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file", hint="name a folder")
    may_write(target, force=force)
