"""Whether a command may write where it was told to: one manner for every file and folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.core.errors import UsageError

ForceOption = Annotated[bool, typer.Option("--force", help="Write over what is there.")]


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
