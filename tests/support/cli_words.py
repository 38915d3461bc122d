"""Parser for command lines in manifests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from typer.main import get_command

from dora_pipe.cli.app import app


def parsed(words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return the innermost command and its parameters. Raises usage errors.

    Example: ``parsed(["worker", "a.toml", "--name", "w0"])[1]["name"] == "w0"``
    """
    name, command, context, remaining_words = "dora-pipe", get_command(app), None, list(words)
    while True:
        context = command.make_context(name, remaining_words, parent=context)
        if not hasattr(command, "resolve_command"):
            return name, context.params
        remaining_words = [*context._protected_args, *context.args]
        name, command, remaining_words = command.resolve_command(context, remaining_words)
