"""How rows of tokens are laid out in passes: what is computed at once, and what shares a line.

Nothing but lengths and a limit decides, so equal rows are laid out alike on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

FILL_MIN: Final = 0.8
"""A row shorter than this share of the longest opens another micro-batch ..."""

WORTH_TOKENS: Final = 768
"""... once the present one holds so many padded tokens: below, a pass costs more than padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """What is placed whole: who it is, and its tokens (prompt included)."""

    ordinal: int
    sibling: int
    tokens: int
    """Of its longest row."""
    others: Sequence[int] = ()
    """Tokens of its other rows."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [self.tokens, *self.others]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What a pass computes, as indices into what was packed, longest first."""

    rows: tuple[int, ...]
    width: int
    """Tokens of the longest row: every line is padded to it."""


def pack(
    rows: Sequence[RowSize], *, padded_tokens_max: int, packing: bool = False
) -> list[MicroBatch]:
    """Cut rows into passes of at most `padded_tokens_max` padded tokens, longest first.

    Equal lengths keep their order (ordinal, sibling, as given). What alone is above the limit gets
    a pass of its own: it cannot be cut. With `packing` rows share lines, as `lines_of` lays them
    out in their order.
    """
    order = sorted(
        range(len(rows)),
        key=lambda index: (-rows[index].tokens, rows[index].ordinal, rows[index].sibling),
    )
    cut = _cut_sharing if packing else _cut
    return list(cut(rows, order, padded_tokens_max))


def lines_of(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Which rows share each line of `width` tokens, by index: every row into the first line that
    has room for it.

    Longest first, these are at most 11/9 of the fewest lines, and 1 (first fit decreasing).

    Example: ``lines_of([5, 4, 3, 1], 6) == [[0, 3], [1], [2]]``
    """
    free: list[int] = []
    lines: list[list[int]] = []
    for index, length in enumerate(lengths):
        place = _place(free, length, width)
        if place == len(lines):
            lines.append([])
        lines[place].append(index)
    return lines


def _place(free: list[int], length: int, width: int) -> int:
    """The first line with room, or a new one; takes the room."""
    for place, room in enumerate(free):
        if length <= room:
            free[place] -= length
            return place
    free.append(width - length)
    return len(free) - 1


def _cut(rows: Sequence[RowSize], order: Sequence[int], limit: int) -> Iterator[MicroBatch]:
    present: list[int] = []
    width = held = 0
    for index in order:
        tokens = rows[index].tokens
        full = (held + len(rows[index].lengths)) * width > limit
        ragged = tokens < FILL_MIN * width and held * width >= WORTH_TOKENS
        if present and (full or ragged):
            yield MicroBatch(rows=tuple(present), width=width)
            present, held = [], 0
        if not present:
            width = tokens
        present.append(index)
        held += len(rows[index].lengths)
    if present:
        yield MicroBatch(rows=tuple(present), width=width)


def _cut_sharing(rows: Sequence[RowSize], order: Sequence[int], limit: int) -> Iterator[MicroBatch]:
    """What finds no room in a pass is for the next one, which is as wide as its longest row."""
    left = list(order)
    while left:
        present: list[int] = []
        later: list[int] = []
        free: list[int] = []
        width = rows[left[0]].tokens
        for index in left:
            then = list(free)
            for length in rows[index].lengths:
                _place(then, length, width)
            if present and len(then) * width > limit:
                later.append(index)
                continue
            present.append(index)
            free = then
        yield MicroBatch(rows=tuple(present), width=width)
        left = later
