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
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    words = "".join(f" {_word(argument)}" for argument in arguments)
    yield f"\n### {name}\n"
    yield f"`dora-pipe {name}{words}`: {_text(command.help)}"
    own = [param for param in command.params if param.name not in COMMON]
    if own:
        yield ""
    yield from (f"- `{_names(entry)}`{_default(entry)}: {entry.help}" for entry in own)


def _text(help: str) -> str:
    return " ".join(help.partition("Example:")[0].split())


def _word(entry: Any) -> str:
    word = str(entry.metavar or entry.name.upper())
    return word if entry.required or word.startswith("[") else f"[{word}]"


def _names(entry: Any) -> str:
    return _word(entry) if entry.param_type_name == "argument" else ", ".join(entry.opts)


def _default(entry: Any) -> str:
    shown = entry.default
    empty = shown is None or shown == "" or shown is False or callable(shown)
    return (
        " (required)"
        if entry.required and entry.opts[0][0] == "-"
        else ""
        if empty
        else f" (`{shown}`)"
    )


def _codes() -> dict[int, str]:
    own = [var for var in vars(errors).values() if isinstance(var, type)]
    results = {
        entry.exit_code: (entry.__doc__ or "").partition("\n")[0]
        for entry in own
        if issubclass(entry, errors.DoraError) and "exit_code" in vars(entry)
    }
    return results | CODES
