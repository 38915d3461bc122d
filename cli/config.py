"""`config`: print a resolved configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from dora_pipe.cli.options import EXAMPLES, JsonOption, OverrideOption
from dora_pipe.cli.output import emit_json, emit_text, takes_unicode
from dora_pipe.config.describe import toml_escape
from dora_pipe.config.load import dump_toml, load_config
from dora_pipe.launch.examples import example_file


def config(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="A TOML file. Default: that of `dora-pipe init`."),
    ] = None,
    override: OverrideOption = None,
    every: Annotated[bool, typer.Option("--all", help="Also advanced keys at defaults.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print the resolved configuration: basic keys and changed ones, with descriptions."""
    resolved = load_config(file or example_file(EXAMPLES[0]), override or ())
    if as_json:
        emit_json(msgspec.to_builtins(resolved))
        return
    shown = dump_toml(resolved, every=every)
    if not takes_unicode():
        shown = "".join(char if char.isascii() else toml_escape(char) for char in shown)
    emit_text(shown)
