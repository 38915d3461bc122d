"""Data on stdout: lines, JSON, tables, names with values.

Nothing that is printed can steer a terminal: what a model sampled, a task said or a file holds may
be an escape sequence, and is written as text.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

from dora_pipe.core.console import say, write_to
from dora_pipe.core.errors import printable

if TYPE_CHECKING:
    from dora_pipe.bus.logged import Damage

PIPE_COLUMNS: Final = 120
"""What flows goes into lines of this width in a pipe; tables are as wide as they are there."""

_UNPRINTABLE: Final = re.compile(r"[^ -~\u00a1-\u00ac\u00ae-\u0377]")
"""What may be unprintable; `str.isprintable` decides."""


def emit_line(line: str = "") -> None:
    """One line of data, to stdout."""
    write_to(sys.stdout, f"{printable(line)}\n")


def emit_text(text: str) -> None:
    """Lines of data that were made elsewhere, to stdout."""
    write_to(sys.stdout, "\n".join(map(printable, text.split("\n"))))


def emit_json(value: Any) -> None:
    """One JSON value on a line of stdout; what a terminal would obey as an escape of JSON's."""
    text = json.dumps(value, ensure_ascii=not takes_unicode(), default=str)
    write_to(sys.stdout, f"{_UNPRINTABLE.sub(_escaped, text)}\n")


def takes_unicode() -> bool:
    """Whether stdout has bytes for every character."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def _escaped(found: re.Match[str]) -> str:
    one = found[0]
    return one if one.isprintable() else json.dumps(one)[1:-1]


def emit_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
) -> None:
    """A table on stdout, readable without colour; its title stands above it.

    Cells wrap between words and nowhere else: an identifier stays whole. Where the terminal is too
    narrow for that, the last columns go, and it is said which.
    """
    from dora_pipe.cli import tables

    if title is not None:
        emit_line(title)
    table = tables.Table([*map(printable, columns)], [[show(cell) for cell in row] for row in rows])
    left_out = table.fit(terminal_columns())
    write_to(sys.stdout, "")
    table.print(sys.stdout, styled=styled(sys.stdout))
    if left_out:
        say(f"note: no room for {', '.join(left_out)}; a wider terminal or --json shows it")


def emit_pairs(pairs: Mapping[str, Any], *, title: str | None = None) -> None:
    """Names and values, one a line, on stdout."""
    emit_table((), list(pairs.items()), title=title)


def flow(cells: Sequence[str]) -> list[Sequence[str]]:
    """Short cells by lines, in as many columns as fit, whole."""
    width = max(map(len, cells), default=0) + len("  ")
    across = max(1, (terminal_columns() or PIPE_COLUMNS) // width)
    padded = [cell.ljust(width) for cell in cells]
    return [padded[at : at + across] for at in range(0, len(cells), across)]


def emit_flow(lines: Iterable[Sequence[str]]) -> None:
    """What `flow` made of cells."""
    for cells in lines:
        emit_line("".join(cells).rstrip())


def show(cell: Any) -> str:
    """A cell as text: numbers short, nothing as a dash."""
    if cell is None or cell == "":
        return "-"
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, float):
        return f"{cell:.4g}" if abs(cell) < 1000 else f"{cell:,.0f}"
    return printable(str(cell))


def emit_rows(
    columns: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    *,
    as_json: bool,
) -> None:
    """Rows as a table, or as one JSON object a line."""
    if as_json:
        for row in rows:
            emit_json(dict(row))
        return
    emit_table(columns, ([row.get(column) for column in columns] for row in rows))


def terminal_columns() -> int | None:
    """Width of the terminal, or as COLUMNS says; None for a pipe: nobody there counts columns."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return shutil.get_terminal_size().columns
    return None


def styled(stream: TextIO) -> bool:
    """Whether bold and colours are wanted there."""
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def draws_blocks() -> bool:
    """Whether stdout can be trusted with more than ASCII."""
    encoding = os.environ.get("PYTHONIOENCODING") or sys.stdout.encoding or "ascii"
    return encoding.lower().startswith("utf")


def raise_if_damaged(damage: Damage, consequence: str) -> None:
    """Name damaged trajectories behind the sound ones, on stderr; raises InvariantBroken where
    there are any. `consequence`: what came of it."""
    for line in damage.lines:
        say(line)
    damage.raise_if_any(consequence)
