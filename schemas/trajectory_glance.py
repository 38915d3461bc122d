"""Looks at a trajectory record without Arrow where it lies as this version writes it.

What is read of the stream is exactly what `view_trajectory` reads of it, and everything that is
checked there is checked here; whatever looks unusual (another schema, a null where none is written,
an offset that does not fit) goes to `view_trajectory`, which decides. A test changes records byte
by byte and holds the two against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Final, cast

import numpy as np
import zstandard

from dora_pipe.errors import SchemaError
from dora_pipe.schemas import wire
from dora_pipe.schemas.arrow_frame import (
    COLUMN_BYTES_MAX,
    ENTRIES_MAX,
    RAW_BYTES_MAX,
    WINDOW_BYTES_MAX,
    decompress,
)
from dora_pipe.schemas.trajectory import (
    Arrays,
    Meta,
    Segment,
    SegmentKind,
    Trajectory,
    check_fields,
)
from dora_pipe.schemas.trajectory_codec import META, TRAJECTORY, view_trajectory

_HEAD: Final = TRAJECTORY.head
_PREFIX: Final = struct.Struct("<iI")  # a message: continuation mark, bytes of its metadata
_HEADER_SLOT: Final = 2  # of the flatbuffers table Message
_BODY_BYTES_SLOT: Final = 3
_NODES_SLOT: Final = 1  # of the table RecordBatch
_BUFFERS_SLOT: Final = 2
_NUMBER: Final = struct.Struct("<q")
_NODES: Final = 26
_BUFFERS: Final = 56
_NODE_NUMBERS: Final = struct.Struct(f"<{2 * _NODES}q")
_BUFFER_NUMBERS: Final = struct.Struct(f"<{2 * _BUFFERS}q")
_PAIR: Final = struct.Struct("<2i")
_KINDS: Final[dict[str, SegmentKind]] = {
    "prompt": "prompt",
    "model": "model",
    "tool": "tool",
    "environment": "environment",
}
_SEGMENTS_MAX: Final = 64
"""Beyond, Arrow is faster."""


class _Unusual(Exception):
    """Not as this version writes it: `view_trajectory` decides."""


class Glancer:
    """Reads many records, in one thread. Example: ``Glancer().glance(record.value).versions``."""

    def __init__(self) -> None:
        self._decompress = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompress
        self._frame = _metadata()

    def glance(self, value: bytes) -> Trajectory:
        """As `view_trajectory`, but log-probs, which are checked, are left empty.

        Raises SchemaError with a path, nothing else.
        """
        try:
            return self._glance(value)
        except (_Unusual, SchemaError, zstandard.ZstdError, struct.error, ValueError, MemoryError):
            found = view_trajectory(value)
            return replace(found, logprobs=(), sampler_logprobs=())

    def _glance(self, value: bytes) -> Trajectory:
        size = zstandard.frame_content_size(value)
        if not 0 <= size <= RAW_BYTES_MAX:
            raise _Unusual
        raw = self._decompress(value, allow_extra_data=False)
        if not raw.startswith(_HEAD):
            raise _Unusual
        return _Batch(raw, self._frame).trajectory()


class _Batch:
    """The record batch of a stream: nodes (length, nulls) and buffers (start, bytes)."""

    def __init__(self, raw: bytes, frame: _Metadata) -> None:
        start = len(_HEAD)
        body = start + frame.size
        if not frame.fits(raw, start):
            raise _Unusual
        (body_bytes,) = _NUMBER.unpack_from(raw, start + frame.body_bytes)
        if not 0 <= body_bytes <= len(raw) - body:
            raise _Unusual
        self._raw = raw
        self._nodes = _NODE_NUMBERS.unpack_from(raw, start + frame.nodes)
        buffers = _BUFFER_NUMBERS.unpack_from(raw, start + frame.buffers)
        for offset, length in zip(buffers[::2], buffers[1::2], strict=True):
            if offset % 8 or not 0 <= offset <= offset + length <= body_bytes or length < 0:
                raise _Unusual
        if sum(buffers[1::2]) > COLUMN_BYTES_MAX or max(self._nodes) > ENTRIES_MAX:
            raise _Unusual
        self._starts = [body + offset for offset in buffers[::2]]
        self._sizes = buffers[1::2]
        self._node = self._buffer = 0

    def trajectory(self) -> Trajectory:
        """What the columns say, in the order of the layout, checked."""
        name = self._text()
        version = self._scalar("<q", 8)
        assert version is not None
        digest = self._digest()
        token_ids = self._list(np.dtype("<i4"))
        logprobs, known = self._floats()
        sampler = self._sampler(logprobs, known)
        mask = self._list(np.dtype("u1"))
        _check(token_ids, mask, (logprobs, known), sampler)
        reward = self._scalar("<d", 8, nullable=True)
        segments = self._segments()
        meta: Meta = wire.decode(self._text().encode(), META, "$.meta")
        trajectory = Trajectory(
            trajectory=name,
            version=version,
            digest=digest,
            token_ids=cast("Sequence[int]", token_ids),
            logprobs=(),
            sampler_logprobs=(),
            loss_mask=cast("Sequence[int]", mask),
            reward=reward,
            segments=segments,
            meta=meta,
        )
        arrays = Arrays(
            token_ids=token_ids, logprobs=logprobs, sampler_logprobs=sampler[0], loss_mask=mask
        )
        check_fields(trajectory, arrays)
        return trajectory

    def _take(self) -> tuple[int, int]:
        """Length and nulls of the next node."""
        at = 2 * self._node
        self._node += 1
        return self._nodes[at], self._nodes[at + 1]

    def _part(self) -> tuple[int, int]:
        """Start and size of the next buffer."""
        at = self._buffer
        self._buffer += 1
        return self._starts[at], self._sizes[at]

    def _plain(self, length: int) -> None:
        """A column of so many values, none of them null, without a bitmap."""
        if self._take() != (length, 0) or self._part()[1]:
            raise _Unusual

    def _bounds(self) -> int:
        """The end of the only list or text of a column."""
        start, size = self._part()
        if size < _PAIR.size:
            raise _Unusual
        first, end = _PAIR.unpack_from(self._raw, start)
        if first or end < 0:
            raise _Unusual
        return int(end)

    def _text(self) -> str:
        self._plain(1)
        end = self._bounds()
        start, size = self._part()
        if end > size:
            raise _Unusual
        return self._raw[start : start + end].decode()

    def _digest(self) -> str:
        self._plain(1)
        start, size = self._part()
        if size < 32:
            raise _Unusual
        return self._raw[start : start + 32].hex()

    def _scalar(self, code: str, width: int, *, nullable: bool = False) -> Any:
        length, nulls = self._take()
        bitmap, bitmap_bytes = self._part()
        start, size = self._part()
        if length != 1 or size < width:
            raise _Unusual
        if not nulls and not bitmap_bytes:
            return struct.unpack_from(code, self._raw, start)[0]
        if nulls != 1 or not nullable or not bitmap_bytes or self._raw[bitmap] & 1:
            raise _Unusual
        return None

    def _list(self, kind: np.dtype[Any]) -> np.ndarray[Any, Any]:
        self._plain(1)
        end = self._bounds()
        self._plain(end)
        return self._values(kind, end)

    def _values(self, kind: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
        start, size = self._part()
        if count * kind.itemsize > size:
            raise _Unusual
        return np.frombuffer(self._raw, kind, count, start)

    def _floats(self) -> tuple[np.ndarray[Any, Any], tuple[int, bytes]]:
        """Values, and (how many are null, the bitmap of those that are not)."""
        self._plain(1)
        end = self._bounds()
        length, nulls = self._take()
        start, size = self._part()
        bits = (end + 7) // 8
        if length != end or not 0 <= nulls <= end or size not in (0, size if nulls else 0):
            raise _Unusual
        if nulls and size < bits:
            raise _Unusual
        bitmap = self._raw[start : start + bits] if nulls else b""
        return self._values(np.dtype("<f4"), end), (nulls, bitmap)

    def _sampler(
        self, logprobs: np.ndarray[Any, Any], known: tuple[int, bytes]
    ) -> tuple[np.ndarray[Any, Any], tuple[int, bytes]]:
        """The column, or the log-probs where it is null."""
        if self._nodes[2 * self._node + 1] == 0:
            return self._floats()
        length, nulls = self._take()
        bitmap, size = self._part()
        if (length, nulls) != (1, 1) or not size or self._raw[bitmap] & 1 or self._bounds():
            raise _Unusual
        self._plain(0)
        self._part()
        return logprobs, known

    def _segments(self) -> list[Segment]:
        self._plain(1)
        count = self._bounds()
        if count > _SEGMENTS_MAX:
            raise _Unusual
        self._plain(count)
        kinds = [_KINDS.get(text) for text in self._texts(count)]
        start, end, turn = (self._numbers("i", 4, count) for _ in range(3))
        start_ns, end_ns = (self._numbers("q", 8, count) for _ in range(2))
        workers = self._texts(count)
        epoch, version = (self._numbers("q", 8, count) for _ in range(2))
        tools, oks = self._texts(count), self._bits(count)
        found = []
        for at, kind in enumerate(kinds):
            if kind is None:
                raise _Unusual
            found.append(
                Segment(
                    kind=kind,
                    start=start[at],
                    end=end[at],
                    turn=turn[at],
                    start_ns=start_ns[at],
                    end_ns=end_ns[at],
                    worker=workers[at],
                    epoch=epoch[at],
                    version=version[at],
                    tool=tools[at],
                    ok=oks[at],
                )
            )
        return found

    def _numbers(self, code: str, width: int, count: int) -> tuple[int, ...]:
        self._plain(count)
        start, size = self._part()
        if count * width > size:
            raise _Unusual
        return struct.unpack_from(f"<{count}{code}", self._raw, start)

    def _bits(self, count: int) -> list[bool]:
        self._plain(count)
        start, size = self._part()
        if count > 8 * size:
            raise _Unusual
        return [bool(self._raw[start + at // 8] >> at % 8 & 1) for at in range(count)]

    def _texts(self, count: int) -> list[str]:
        self._plain(count)
        start, size = self._part()
        data, data_bytes = self._part()
        if not count:
            return []
        if 4 * (count + 1) > size:
            raise _Unusual
        ends = struct.unpack_from(f"<{count + 1}i", self._raw, start)
        if ends[0] or ends[-1] > data_bytes or list(ends) != sorted(ends):
            raise _Unusual
        pairs = pairwise(ends)
        return [self._raw[data + first : data + last].decode() for first, last in pairs]


class _Metadata:
    """The metadata of a record batch as this version writes it: the same, but for its numbers."""

    def __init__(self, raw: bytes) -> None:
        start = len(_HEAD)
        self.size = _PREFIX.size + _PREFIX.unpack_from(raw, start)[1]
        whole = raw[start : start + self.size]
        message = _PREFIX.size + _place(whole, _PREFIX.size)
        self.body_bytes = _field(whole, message, _BODY_BYTES_SLOT)
        header = _field(whole, message, _HEADER_SLOT)
        batch = header + _place(whole, header)
        self.nodes = _vector(whole, _field(whole, batch, _NODES_SLOT), _NODES)
        self.buffers = _vector(whole, _field(whole, batch, _BUFFERS_SLOT), _BUFFERS)
        numbers = [
            (self.body_bytes, _NUMBER.size),
            (self.nodes, _NODE_NUMBERS.size),
            (self.buffers, _BUFFER_NUMBERS.size),
        ]
        self._same: list[tuple[int, bytes]] = []
        at = 0
        for place, length in [*sorted(numbers), (self.size, 0)]:
            self._same.append((at, whole[at:place]))
            at = place + length

    def fits(self, raw: bytes, start: int) -> bool:
        """Whether everything but the numbers is the same there."""
        return all(raw.startswith(piece, start + at) for at, piece in self._same)


@cache
def _metadata() -> _Metadata:
    values: dict[str, Any] = {
        "trajectory": "",
        "version": 0,
        "weights_digest": bytes(32),
        "reward": 0.0,
        "meta_json": "",
    }
    columns = [TRAJECTORY.column(name, values.get(name, [])) for name in TRAJECTORY.schema.names]
    return _Metadata(decompress(TRAJECTORY.seal(columns)))


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


def _check(
    token_ids: np.ndarray[Any, Any],
    mask: np.ndarray[Any, Any],
    *floats: tuple[np.ndarray[Any, Any], tuple[int, bytes]],
) -> None:
    """What `check_arrays` checks, all at once: whether anything is unusual."""
    count = len(mask)
    if len(token_ids) != count or (count and (token_ids.min() < 0 or mask.max() > 1)):
        raise _Unusual
    sampled = mask.view(np.bool_)
    nulls = count - int(np.count_nonzero(sampled))
    seen = None
    for values, (null_count, bitmap) in floats:
        if values is seen:
            continue
        seen = values
        if len(values) != count or null_count != nulls:
            raise _Unusual
        if nulls and not _is_bitmap(bitmap, sampled):
            raise _Unusual
        chosen = values[sampled] if nulls else values
        # A NaN is neither: the comparison fails, too.
        if len(chosen) and not (chosen.max() <= 0 and chosen.min() > -np.inf):
            raise _Unusual


def _is_bitmap(bitmap: bytes, sampled: np.ndarray[Any, Any]) -> bool:
    packed = np.packbits(sampled, bitorder="little").tobytes()
    spare = len(sampled) % 8
    if not spare:
        return packed == bitmap
    used = (1 << spare) - 1  # What the last byte says beyond the end is nobody's business.
    return packed[:-1] == bitmap[:-1] and packed[-1] == bitmap[-1] & used
