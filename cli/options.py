"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.defaults import PARADIGM_NAMES
from dora_pipe.core.console import RUNS_VARIABLE

JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object a line.")]
RunsOption = Annotated[
    Path, typer.Option("--runs", metavar="DIR", envvar=RUNS_VARIABLE, help="Where runs lie.")
]
RunArgument = Annotated[
    str,
    typer.Argument(help="A run's name, the path of its directory or archive, or kafka://.../RUN."),
]
OverrideOption = Annotated[
    list[str] | None, typer.Option("-o", "--override", help="key=value, e.g. -o run.steps=20")
]
ParadigmOption = Annotated[
    str,
    typer.Option(
        "--paradigm", help=f"One of {', '.join(PARADIGM_NAMES)}: keys laid over the file."
    ),
]
ArchiveOption = Annotated[
    Path | None,
    typer.Option("--archive", metavar="DIR", help="Where what the log no longer has is read."),
]
