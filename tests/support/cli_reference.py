"""Command-line reference, from the commands and error classes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from dora_pipe.cli.app import COMMANDS, app
from dora_pipe.core import errors

HEAD = """# Command line

<!-- Written by `python -m tests.support.reference_pages`; change the commands in cli/. -->

`dora-pipe COMMAND --help` prints the same text and an example.

- `RUN`: the name of a run, its directory, a `.sqlite` file, or `kafka://HOST:PORT/RUN`.
- `CONFIG`: a TOML file, or the directory of a run.
- `--runs DIR`: the directory of runs.
- `-o KEY=VALUE`: a value for a configuration key.
- `--json`: one JSON object per line.
- `--force`: overwrite an existing file or directory.

Parentheses contain defaults."""

COMMON = {"help", "root", "override", "as_json", "run", "config", "force"}

CODES = {0: "Success.", 1: "A check failed, or an unexpected error.", 130: "Interrupted by Ctrl-C."}


def page() -> str:
    """Return docs/reference/cli.md."""
    lines, commands = [HEAD], get_command(app).commands  # type: ignore[attr-defined]
    for panel, names in COMMANDS.items():
        lines.append(f"\n## {panel}")
        for name in names:
            lines += _sections(name, commands[name])
    lines += ["\n## Exit codes\n"]
    lines += [f"- `{code}`: {meaning}" for code, meaning in sorted(_codes().items())]
    return "\n".join(lines) + "\n"


def _sections(name: str, command: Any) -> Iterator[str]:
    if hasattr(command, "commands"):
        for inner in command.commands:
            yield from _sections(f"{name} {inner}", command.commands[inner])
        if not command.invoke_without_command:
            return
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    words = "".join(f" {_word(one)}" for one in arguments)
    yield f"\n### {name}\n"
    yield f"`dora-pipe {name}{words}`: {_text(command.help)}"
    own = [one for one in command.params if one.name not in COMMON]
    if own:
        yield ""
    yield from (f"- `{_names(one)}`{_default(one)}: {one.help}" for one in own)


def _text(help: str) -> str:
    return " ".join(help.partition("Example:")[0].split())


def _word(one: Any) -> str:
    word = str(one.metavar or one.name.upper())
    return word if one.required or word.startswith("[") else f"[{word}]"


def _names(one: Any) -> str:
    return _word(one) if one.param_type_name == "argument" else ", ".join(one.opts)


def _default(one: Any) -> str:
    shown = one.default
    empty = shown is None or shown == "" or shown is False or callable(shown)
    return (
        " (required)"
        if one.required and one.opts[0][0] == "-"
        else ""
        if empty
        else f" (`{shown}`)"
    )


def _codes() -> dict[int, str]:
    own = [one for one in vars(errors).values() if isinstance(one, type)]
    found = {
        one.exit_code: (one.__doc__ or "").partition("\n")[0]
        for one in own
        if issubclass(one, errors.DoraError) and "exit_code" in vars(one)
    }
    return found | CODES
