"""Fit a table to a terminal: choose columns and widths; rich draws it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Drawn
from rich.text import Text

from dora_pipe.core.system.console import write_to

GAP: Final = 2

WORDS_MIN: Final = 16
"""Minimum width of text while other columns can be dropped."""

COLUMNS_MIN: Final = 2
"""Columns that are always shown."""


class Table:
    """Text cells under columns; no head without columns."""

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self._head = distinct(columns)
        self._rows = [list(row) for row in rows]
        count = max([len(self._head), *(len(row) for row in self._rows)], default=0)
        self._kept = list(range(count))
        lines = [self._head, *self._rows] if self._head else self._rows
        cells = [[line[index] for line in lines if index < len(line)] for index in range(count)]
        self._widths = [max(map(cell_len, of), default=0) for of in cells]
        words = [[word for cell in of for word in cell.split(" ")] for of in cells]
        longest = [max(map(cell_len, of), default=0) for of in words]
        # Minimum widths: single words stay whole, sentences may wrap.
        self._least = [
            min(width, max(word, WORDS_MIN))
            for width, word in zip(self._widths, longest, strict=True)
        ]

    def fit(self, width: int | None) -> list[str]:
        """Narrow the table to a width; return the dropped columns.

        With `COLUMNS_MIN` columns left, or without a head, it may be wider.
        """
        removed: list[str] = []
        if width is None:
            return removed
        while self._head and len(self._kept) > COLUMNS_MIN and self._room(self._least) > width:
            removed.append(self._head[self._kept.pop()])
        while self._room(self._widths) > width:
            slack = {column: self._widths[column] - self._least[column] for column in self._kept}
            widest = max(slack, key=lambda column: (slack[column] > 0, self._widths[column]))
            if slack[widest] <= 0:
                break
            self._widths[widest] -= 1
        return removed

    def _room(self, widths: Sequence[int]) -> int:
        return sum(widths[column] for column in self._kept) + GAP * (len(self._kept) - 1)

    def print(self, stream: TextIO, *, styled: bool) -> None:
        drawn = Drawn(
            box=None,
            pad_edge=False,
            padding=(0, GAP, 0, 0),
            header_style="bold",
            show_header=bool(self._head),
        )
        for column in self._kept:
            drawn.add_column(
                Text(self._head[column]) if self._head else "", width=self._widths[column]
            )
        for row in self._rows:
            drawn.add_row(
                *(Text(row[column]) if column < len(row) else "" for column in self._kept)
            )
        width = max(1, self._room(self._widths))
        color: Literal["auto"] | None = "auto" if styled else None
        console = Console(file=stream, highlight=False, width=width, color_system=color)
        with console.capture() as captured:
            console.print(drawn)
        write_to(stream, captured.get())  # rich exits if the reader has closed the pipe


def distinct(names: Sequence[str]) -> list[str]:
    """Number repeated names: ``distinct(["run", "run"]) == ["run", "run (2)"]``."""
    taken: list[str] = []
    for name in names:
        number, unique = 1, name
        while unique in taken:
            number += 1
            unique = f"{name} ({number})"
        taken.append(unique)
    return taken
