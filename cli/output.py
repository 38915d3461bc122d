"""Print data on stdout: lines, JSON, tables, pairs.

Escapes control sequences in data, so that output cannot control a terminal.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from dora_pipe.core.errors import printable
from dora_pipe.core.system.console import say, write_to

if TYPE_CHECKING:
    from dora_pipe.bus.logged import Damage

PIPE_COLUMNS: Final = 120
"""Line width of flowed text in a pipe; tables are not limited."""

_UNPRINTABLE: Final = re.compile(r"[^ -~\u00a1-\u00ac\u00ae-\u0377]")
"""Fast test for unprintable characters; `str.isprintable` confirms."""


def emit_line(line: str = "") -> None:
    write_to(sys.stdout, f"{printable(line)}\n")


def emit_text(text: str) -> None:
    write_to(sys.stdout, "\n".join(map(printable, text.split("\n"))))


def emit_json(value: Any) -> None:
    """Print one line of JSON; control characters become JSON escapes."""
    text = json.dumps(value, ensure_ascii=not takes_unicode(), default=str)
    write_to(sys.stdout, f"{_UNPRINTABLE.sub(_escaped, text)}\n")


def takes_unicode() -> bool:
    """Return whether stdout can encode every character."""
    encoding = os.environ.get("PYTHONIOENCODING") or sys.stdout.encoding or "ascii"
    return encoding.lower().startswith("utf")


def _escaped(match: re.Match[str]) -> str:
    char = match[0]
    return char if char.isprintable() else json.dumps(char)[1:-1]


def emit_table(
    columns: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str | None = None
) -> None:
    """Print a table with an optional title.

    Cells wrap only between words. On a narrow terminal the last columns are dropped and named.
    """
    from dora_pipe.cli import tables

    if title is not None:
        emit_line(title)
    table = tables.Table([*map(printable, columns)], [[show(cell) for cell in row] for row in rows])
    left_out = table.fit(terminal_columns())
    write_to(sys.stdout, "")
    table.print(sys.stdout, styled=styled(sys.stdout))
    if left_out:
        say(f"note: columns left out: {', '.join(left_out)}; use a wider terminal or --json")


def emit_pairs(pairs: Mapping[str, Any], *, title: str | None = None) -> None:
    """Print names and values, one per line."""
    emit_table((), list(pairs.items()), title=title)


def flow(cells: Sequence[str]) -> list[Sequence[str]]:
    """Arrange short cells in as many columns as fit."""
    width = max(map(len, cells), default=0) + len("  ")
    across = max(1, (terminal_columns() or PIPE_COLUMNS) // width)
    padded = [cell.ljust(width) for cell in cells]
    return [padded[index : index + across] for index in range(0, len(cells), across)]


def emit_flow(lines: Iterable[Sequence[str]]) -> None:
    """Print the result of `flow`."""
    for cells in lines:
        emit_line("".join(cells).rstrip())


def show(cell: Any) -> str:
    """Format a cell: numbers short, missing values as a dash."""
    if cell is None or cell == "":
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return printable(str(cell))


def emit_rows(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], *, as_json: bool) -> None:
    """Print rows as a table, or as one JSON object per line."""
    if as_json:
        for row in rows:
            emit_json(dict(row))
        return
    emit_table(columns, ([row.get(column) for column in columns] for row in rows))


def terminal_columns() -> int | None:
    """Return the terminal's width or COLUMNS; None for a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def styled(stream: TextIO) -> bool:
    """Return whether a stream gets bold text and colors."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def raise_if_damaged(damage: Damage, consequence: str) -> None:
    """Print damaged trajectories and the consequence on stderr; raise InvariantBroken if any."""
    for line in damage.lines:
        say(line)
    damage.raise_if_any(consequence)
