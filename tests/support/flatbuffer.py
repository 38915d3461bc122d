"""Writes Arrow schema messages that no library writes: shared tables, lies, the other byte order.

Only forward offsets, so what is referred to is written later; several may refer to one table.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

INT, UTF8, LIST, STRUCT, UNION, UTF8_VIEW = 2, 5, 12, 13, 14, 24
"""Tags of Arrow's types."""

Value = tuple[str, int]
"""A number in a table: its struct format and what it is."""


class Flat:
    """A flatbuffer in the making. Example: ``Flat().root()``."""

    def __init__(self) -> None:
        self.data = bytearray(4)

    def table(self, values: Mapping[int, Value], refs: Sequence[int] = ()) -> Table:
        """A table with numbers and places for offsets, by slot."""
        slots = max([*values, *refs], default=-1) + 1
        self._pad(8)
        at_vtable = len(self.data)
        self.data += bytes(4 + 2 * slots)
        self._pad(8)
        at = len(self.data)
        self.data += struct.pack("<i", at - at_vtable)
        places: dict[int, int] = {}
        for slot in sorted([*values, *refs]):
            pattern, number = values.get(slot, ("<I", 0))
            self._pad(struct.calcsize(pattern))
            places[slot] = len(self.data)
            self.data += struct.pack(pattern, number)
            struct.pack_into("<H", self.data, at_vtable + 4 + 2 * slot, places[slot] - at)
        size = len(self.data) - at
        struct.pack_into("<HH", self.data, at_vtable, 4 + 2 * slots, size)
        return Table(at=at, places=places)

    def vector(self, count: int) -> list[int]:
        """A vector of offsets: their places."""
        self._pad(4)
        self.data += struct.pack("<I", count) + bytes(4 * count)
        return [len(self.data) - 4 * (count - index) for index in range(count)]

    def text(self, text: bytes) -> int:
        """A text: where it lies."""
        self._pad(4)
        at = len(self.data)
        self.data += struct.pack("<I", len(text)) + text + b"\0"
        return at

    def point(self, place: int, target: int) -> None:
        """Let the offset at a place lead to a target behind it."""
        assert target > place
        struct.pack_into("<I", self.data, place, target - place)

    def _pad(self, to: int) -> None:
        self.data += bytes(-len(self.data) % to)


@dataclass(frozen=True, slots=True)
class Table:
    """Where a table lies, and its offsets by slot."""

    at: int
    places: Mapping[int, int] = field(default_factory=dict)


def schema_message(
    levels: Sequence[int],
    *,
    tag: int = INT,
    endianness: int = 0,
    texts: int = 0,
    text: bytes = b"",
    dictionary: bool = False,
) -> bytes:
    """A schema whose fields of each level all have the same children: those of the next level.

    ``levels == [3, 1]`` are three fields (one table), each with one child. The last are of type
    `tag`, with `texts` texts that are all one pair; those above are structs.
    """
    flat = Flat()
    message = flat.table({0: ("<h", 4), 1: ("<B", 1), 3: ("<q", 0)}, [2])
    flat.point(0, message.at)
    schema = flat.table({0: ("<h", endianness)}, [1])
    flat.point(message.places[2], schema.at)
    holder, slot = schema, 1
    for depth, count in enumerate(levels):
        last = depth == len(levels) - 1
        places = flat.vector(count)
        flat.point(holder.places[slot], places[0] - 4)
        refs = [
            0,
            3,
            *([] if last else [5]),
            *([6] if last and texts else []),
            *([4] if dictionary else []),
        ]
        holder, slot = flat.table({1: ("<B", 1), 2: ("<B", tag if last else STRUCT)}, refs), 5
        for place in places:
            flat.point(place, holder.at)
        _leaf(flat, holder, tag if last else STRUCT, texts, text)
    return _framed(bytes(flat.data))


def _leaf(flat: Flat, holder: Table, tag: int, texts: int, text: bytes) -> None:
    """Name, type, texts and dictionary of a field."""
    flat.point(holder.places[0], flat.text(b"x"))
    kind = flat.table({0: ("<i", 32), 1: ("<B", 1)} if tag == INT else {})
    flat.point(holder.places[3], kind.at)
    if 4 in holder.places:
        flat.point(holder.places[4], flat.table({0: ("<q", 1)}).at)
    if 6 in holder.places:
        places = flat.vector(texts)
        flat.point(holder.places[6], places[0] - 4)
        pair = flat.table({}, [0, 1])
        for place in places:
            flat.point(place, pair.at)
        both = flat.text(text)
        for place in pair.places.values():
            flat.point(place, both)


def _framed(metadata: bytes) -> bytes:
    padded = metadata + bytes(-len(metadata) % 8)
    return struct.pack("<iI", -1, len(padded)) + padded
