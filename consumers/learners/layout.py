"""Layout of token rows in passes and lines, by lengths alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

FILL_MIN: Final = 0.8
"""Rows shorter than this share of the longest start a new micro-batch, above `WORTH_TOKENS`."""

WORTH_TOKENS: Final = 768
"""Padded tokens below which a new pass costs more than padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSize:
    """Sizes of a unit that cannot be split, prompts included."""

    ordinal: int
    sample: int
    tokens: int
    others: Sequence[int] = ()

    @property
    def lengths(self) -> list[int]:
        return [self.tokens, *self.others]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of a pass, as indices into the packed sequence, longest first."""

    rows: tuple[int, ...]
    width: int


def pack(
    rows: Sequence[RowSize], *, padded_tokens_max: int, packing: bool = False
) -> list[MicroBatch]:
    """Cut rows into passes of at most `padded_tokens_max` padded tokens, longest first.

    Equal lengths keep their order. An oversized unit gets its own pass. `packing` lets rows share
    lines.
    """
    order = sorted(
        range(len(rows)),
        key=lambda index: (-rows[index].tokens, rows[index].ordinal, rows[index].sample),
    )
    cut = _cut_sharing if packing else _cut
    return list(cut(rows, order, padded_tokens_max))


def lines_of(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Return the rows of each line of `width` tokens, by index, first fit.

    Longest first, at most 11/9 of the fewest lines plus 1.

    Example: ``lines_of([5, 4, 3, 1], 6) == [[0, 3], [1], [2]]``
    """
    free: list[int] = []
    lines: list[list[int]] = []
    for index, length in enumerate(lengths):
        line = _fit(free, length, width)
        if line == len(lines):
            lines.append([])
        lines[line].append(index)
    return lines


def _fit(free: list[int], length: int, width: int) -> int:
    for line, room in enumerate(free):
        if length <= room:
            free[line] -= length
            return line
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
    remaining = list(order)
    while remaining:
        present: list[int] = []
        later: list[int] = []
        free: list[int] = []
        width = rows[remaining[0]].tokens
        for index in remaining:
            then = list(free)
            for length in rows[index].lengths:
                _fit(then, length, width)
            if present and len(then) * width > limit:
                later.append(index)
                continue
            present.append(index)
            free = then
        yield MicroBatch(rows=tuple(present), width=width)
        remaining = later
