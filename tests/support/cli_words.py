"""What the command line makes of words that stand in a manifest, without doing what they say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from dora_pipe.cli.app import app


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The command and its parameters. Raises the command line's own error for a wrong word.

    Example: ``parsed(["worker", "a.toml", "--name", "w0"])[1]["name"] == "w0"``
    """
    group: Any = get_command(app)
    context = group.make_context("dora-pipe", list(words))
    rest = [*context._protected_args, *context.args]
    name, command, left = group.resolve_command(context, rest)
    params: dict[str, Any] = command.make_context(name, left, parent=context).params
    return name, params
