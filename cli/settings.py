"""`dora-pipe config show`: the configuration as it will be used."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dora_pipe.cli.output import emit_json
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.config.paradigms import PARADIGMS

ConfigArgument = Annotated[Path, typer.Argument(help="A TOML file.")]
OverrideOption = Annotated[
    list[str] | None, typer.Option("-o", "--override", help="key=value, e.g. -o run.steps=20")
]

ParadigmOption = Annotated[
    str,
    typer.Option("--paradigm", help=f"One of {', '.join(PARADIGMS)}: keys laid over the file."),
]


def show(
    config: ConfigArgument,
    override: OverrideOption = None,
    paradigm: ParadigmOption = "",
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print the resolved configuration, every key with its meaning."""
    resolved = load_config(config, override or (), paradigm=paradigm)
    if as_json:
        emit_json(msgspec.to_builtins(resolved))
        return
    typer.echo(dump_toml(resolved), nl=False)
