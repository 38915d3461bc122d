"""How a batch is cut: minibatches for updates, micro-batches for passes; a function of the batch.

Nothing but dispatch ordinal, sibling and length enters, so the same batch is cut the same way on
every machine, and its bits can be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

T = TypeVar("T")

FILL_MIN: Final = 0.8
"""A row shorter than this share of the longest opens another micro-batch ..."""

WORTH_TOKENS: Final = 768
"""... once the present one holds so many padded tokens: below, a pass costs more than padding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One trajectory to place: who it is, and its tokens (prompt included)."""

    ordinal: int
    sibling: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Rows of one forward and backward pass, as indices into what was packed, longest first."""

    rows: tuple[int, ...]
    width: int
    """Tokens of the longest row: every row is padded to it."""

    @property
    def padded_tokens(self) -> int:
        """What the pass computes."""
        return len(self.rows) * self.width


def minibatches(groups: Sequence[T], count: int) -> list[list[T]]:
    """Deal groups (in dispatch order) to `count` updates like cards; whole groups, never empty.

    Dealing mixes versions and ages. Fewer groups than updates give fewer updates.

    Example: ``minibatches("abcde", 2) == [["a", "c", "e"], ["b", "d"]]``
    """
    return [list(groups[start::count]) for start in range(min(count, len(groups)))]


def pack(rows: Sequence[Row], *, padded_tokens_max: int) -> list[MicroBatch]:
    """Cut rows into passes of at most `padded_tokens_max` padded tokens, longest first.

    Equal lengths keep their order (ordinal, sibling). A single row above the limit gets a pass of
    its own: it cannot be cut.
    """
    order = sorted(
        range(len(rows)),
        key=lambda index: (-rows[index].tokens, rows[index].ordinal, rows[index].sibling),
    )
    return list(_cut(rows, order, padded_tokens_max))


def _cut(rows: Sequence[Row], order: Sequence[int], limit: int) -> Iterator[MicroBatch]:
    present: list[int] = []
    width = 0
    for index in order:
        tokens = rows[index].tokens
        full = (len(present) + 1) * width > limit
        ragged = tokens < FILL_MIN * width and len(present) * width >= WORTH_TOKENS
        if present and (full or ragged):
            yield MicroBatch(rows=tuple(present), width=width)
            present = []
        if not present:
            width = tokens
        present.append(index)
    if present:
        yield MicroBatch(rows=tuple(present), width=width)
