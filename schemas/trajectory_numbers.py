"""The numbers of a trajectory's Arrow record batch, read by hand where this version has written it.

The layout never changes, so neither do a batch's metadata but for its numbers: how long columns
are, how many of their entries are null, and where buffers lie. Whoever finds anything else leaves
the record to Arrow.
"""

from __future__ import annotations

import struct
from functools import cache
from operator import add
from typing import Any, Final, NamedTuple

from dora_pipe.schemas.arrow_frame import COLUMN_BYTES_MAX, decompress
from dora_pipe.schemas.trajectory_codec import TRAJECTORY

NODES: Final = 26
"""Columns and what is nested in them."""

BUFFERS: Final = 56
"""Bitmaps, offsets, values."""

_SMALL_BYTES_MAX: Final = COLUMN_BYTES_MAX // BUFFERS
"""Buffers that lie in a body of this size cannot be too large together."""

_HEAD: Final = TRAJECTORY.head
_PREFIX: Final = struct.Struct("<iI")  # a message: continuation mark, bytes of its metadata
_HEADER_SLOT: Final = 2  # of the flatbuffers table Message
_BODY_BYTES_SLOT: Final = 3
_NODES_SLOT: Final = 1  # of the table RecordBatch
_BUFFERS_SLOT: Final = 2
_MULTIPLES_OF_8: Final = bytes(range(0, 256, 8))


class Unusual(Exception):
    """Not as this version writes it: Arrow decides."""


class Numbers(NamedTuple):
    """A batch: its body, in which every buffer lies."""

    body: bytes
    nodes: tuple[int, ...]
    """Length and nulls of each."""
    starts: tuple[int, ...]
    """Of buffers."""
    sizes: tuple[int, ...]
    """Of buffers, in bytes."""


class Metadata:
    """The metadata of a record batch as this version writes it: the same, but for its numbers."""

    def __init__(self, raw: bytes) -> None:
        start = len(_HEAD)
        size = _PREFIX.size + _PREFIX.unpack_from(raw, start)[1]
        self._body = start + size
        whole = raw[start : start + size]
        message = _PREFIX.size + _place(whole, _PREFIX.size)
        header = _field(whole, message, _HEADER_SLOT)
        batch = header + _place(whole, header)
        body_bytes = _field(whole, message, _BODY_BYTES_SLOT)
        buffers = _vector(whole, _field(whole, batch, _BUFFERS_SLOT), BUFFERS)
        nodes = _vector(whole, _field(whole, batch, _NODES_SLOT), NODES)
        numbers = [(body_bytes, 1), (buffers, 2 * BUFFERS), (nodes, 2 * NODES), (size, 0)]
        assert numbers == sorted(numbers), "Arrow writes its metadata in another order"
        self._same: list[tuple[int, bytes]] = []
        at, layout = 0, "<"
        for place, count in numbers:
            self._same.append((start + at, whole[at:place]))
            layout += f"{place - at}x{count}Q"  # What is negative becomes huge.
            at = place + 8 * count
        self._numbers = struct.Struct(layout)
        self._low_bytes = slice(start + buffers, start + buffers + 16 * BUFFERS, 16)

    def numbers(self, raw: bytes) -> Numbers:
        """The numbers of a stream. Raises Unusual where anything else is not as it always is."""
        for at, piece in self._same:
            if not raw.startswith(piece, at):
                raise Unusual
        found = self._numbers.unpack_from(raw, len(_HEAD))
        starts, sizes = found[1 : 2 * BUFFERS : 2], found[2 : 2 * BUFFERS + 1 : 2]
        body = raw[self._body :]
        if found[0] > len(body) or max(map(add, starts, sizes)) > found[0]:
            raise Unusual
        if found[0] > _SMALL_BYTES_MAX and sum(sizes) > COLUMN_BYTES_MAX:
            raise Unusual
        if raw[self._low_bytes].translate(None, _MULTIPLES_OF_8):
            raise Unusual
        return Numbers(body, found[2 * BUFFERS + 1 :], starts, sizes)


@cache
def metadata() -> Metadata:
    """That of a trajectory."""
    values: dict[str, Any] = {
        "trajectory": "",
        "version": 0,
        "weights_digest": bytes(32),
        "reward": 0.0,
        "meta_json": "",
    }
    columns = [TRAJECTORY.column(name, values.get(name, [])) for name in TRAJECTORY.schema.names]
    return Metadata(decompress(TRAJECTORY.seal(columns)))


def _place(data: bytes, at: int) -> int:
    return int(struct.unpack_from("<I", data, at)[0])


def _field(data: bytes, table: int, slot: int) -> int:
    """Where a flatbuffers table of our own making keeps a field."""
    slots = table - struct.unpack_from("<i", data, table)[0]
    offset = struct.unpack_from("<H", data, slots + 4 + 2 * slot)[0]
    assert offset, "a record batch always says this"
    return int(table + offset)


def _vector(data: bytes, at: int, count: int) -> int:
    """Where the entries of a vector of so many begin."""
    vector = at + _place(data, at)
    assert _place(data, vector) == count, "the layout has other columns"
    return vector + 4
