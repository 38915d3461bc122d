"""How the command line talks: data on stdout, talk on stderr, errors as one line and a hint."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dora_pipe.errors import DoraError

PIPE_COLUMNS = 200
"""Width of tables that go into a pipe, where no terminal says how wide it is."""


def say(line: str) -> None:
    """One line of talk, to stderr."""
    typer.echo(line, err=True)


def complain(error: DoraError) -> None:
    """An error as people read it."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def emit_json(value: Any) -> None:
    """One JSON value on a line of stdout."""
    typer.echo(json.dumps(value, ensure_ascii=False, default=str))


def emit_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
) -> None:
    """A table on stdout; readable without colour."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(show(cell)) for cell in row))
    _console().print(table)


def emit_pairs(pairs: Mapping[str, Any], *, title: str | None = None) -> None:
    """Names and values, one a line, on stdout."""
    emit_table(("", ""), list(pairs.items()), title=title)


def show(cell: Any) -> str:
    """A cell as text: numbers short, nothing as a dash."""
    if cell is None or cell == "":
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return str(cell)


def emit_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> None:
    """Rows as a table, or as one JSON object a line."""
    if as_json:
        for row in rows:
            emit_json(dict(row))
        return
    emit_table(columns, ([row.get(column) for column in columns] for row in rows))


def _console() -> Console:
    """stdout; never wraps at 80 columns in a pipe, honours NO_COLOR."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    width = int(os.environ.get("COLUMNS", PIPE_COLUMNS))
    return Console(file=sys.stdout, highlight=False, width=width, color_system=None)
