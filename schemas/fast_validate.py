"""Reads and checks a trajectory record without Arrow where it lies as this version writes it.

What is read of the stream is exactly what `view_trajectory` reads of it, and everything that is
checked there is checked here; whatever looks unusual (another schema, a null where none is written,
an offset that does not fit) goes to `view_trajectory`, which decides and says why. A test changes
records byte by byte and holds the two against each other.

The layout of a version never changes, so neither do a batch's metadata but for their numbers: how
long columns are, how many of their entries are null, and where buffers lie. A mask has to be what
segments say, and a bitmap of nulls what the mask says: both are made from the segments, which are
few, and compared as bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from operator import add, itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_frame import (
    COLUMN_BYTES_MAX,
    ENTRIES_MAX,
    RAW_BYTES_MAX,
    WINDOW_BYTES_MAX,
    decompress,
)
from dora_pipe.schemas.arrow_message import field_at, target_of
from dora_pipe.schemas.routes import Routes
from dora_pipe.schemas.trajectory import Described, Segment, Trajectory, check_fields
from dora_pipe.schemas.trajectory_codec import (
    LISTS,
    META,
    ROUTED,
    SEGMENT,
    TRAJECTORY,
    RecordLayout,
    check_routed,
    view_trajectory,
)
from dora_pipe.schemas.wire import decode

SEGMENTS_MAX: Final = 64
"""Beyond, Arrow is faster."""

_TEXTS_KEPT_MAX: Final = 4096
"""Columns of texts that are remembered: kinds and workers are nearly always the same few."""

_KINDS: Final = frozenset({"prompt", "model", "tool", "environment"})
_PAIR: Final = struct.Struct("<2i")
_NOTHING: Final = _PAIR.pack(0, 0)
_LONG: Final = struct.Struct("<q")
_DOUBLE: Final = struct.Struct("<d")
_INTEGER_ROWS: Final = tuple(struct.Struct(f"<{count}i") for count in range(SEGMENTS_MAX + 2))
_LONG_ROWS: Final = tuple(struct.Struct(f"<{count}q") for count in range(SEGMENTS_MAX + 1))
_FINITE_MAX: Final = -0x00800001
"""The bits of the lowest finite float32 as an int32. All negative floats, -0 among them, are below
it or equal; infinity, NaN and what is not negative are above."""


class Unusual(Exception):
    """Not as this version writes it: Arrow decides."""


class FastValidator:
    """Reads many records, in one thread. Example: ``FastValidator().look(value).sampled``."""

    def __init__(self) -> None:
        self._decompress = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX).decompress
        self._frames = row_metadata(), row_metadata(routed=True)
        self._texts: dict[tuple[bytes, bytes], tuple[str, ...]] = {}

    def look(self, value: bytes) -> Described:
        """What a record says, but for its arrays, which were checked.

        Raises SchemaError with a path, nothing else.
        """
        try:
            return self._row(value)
        except _GIVES_UP:
            return view_trajectory(value)

    def view(self, value: bytes) -> Trajectory:
        """As `view_trajectory`, in half the time."""
        try:
            return self._row(value).whole()
        except _GIVES_UP:
            return view_trajectory(value)

    def _row(self, value: bytes) -> _Row:
        size = zstandard.frame_content_size(value)
        if not 0 <= size <= RAW_BYTES_MAX:
            raise Unusual
        raw = self._decompress(value, allow_extra_data=False)
        for frame in self._frames:
            if raw.startswith(frame.head):
                return _Row(raw, frame, self._texts)
        raise Unusual


_GIVES_UP: Final = (
    Unusual,
    SchemaError,
    zstandard.ZstdError,
    struct.error,
    ValueError,
    MemoryError,
)


class _Place(NamedTuple):
    """Where a column, or what is nested in it, stands in a record batch."""

    node: int
    """Of the lengths and nulls."""
    bitmap: int
    """Of the buffers the first; offsets or values are behind it."""


def _places(schema: pa.Schema) -> tuple[dict[str, _Place], int, int]:
    """By path (`segments[].kind`); and how many nodes and buffers there are."""
    found: dict[str, _Place] = {}
    nodes = buffers = 0
    nested = [(field.name, field.type) for field in reversed(schema)]
    while nested:
        path, kind = nested.pop()
        found[path] = _Place(nodes, buffers)
        nodes += 1
        buffers += 3 if kind in (pa.utf8(), pa.binary()) else 2
        if pa.types.is_list(kind):
            nested.append((f"{path}[]", kind.value_type))
        elif pa.types.is_struct(kind):
            buffers -= 1
            nested += [(f"{path}.{field.name}", field.type) for field in reversed(kind)]
    return found, nodes, buffers


_PLACES, NODES, _BUFFERS = _places(TRAJECTORY.schema)
_ROUTED_PLACES, ROUTED_NODES, _ROUTED_BUFFERS = _places(TRAJECTORY.routed.schema)
"""Of a record with routes: the same, and behind them what the routes need."""
_ROUTES_NODES: Final = slice(2 * NODES, 2 * ROUTED_NODES)
_ROUTES_NEVER_NULL: Final = itemgetter(
    *(one.bitmap for path, one in _ROUTED_PLACES.items() if path not in _PLACES)
)
_ROUTES_SURE: Final = (1, 0) * (ROUTED_NODES - NODES)
_ROUTES_SIZES: Final = tuple(
    _ROUTED_PLACES[f"{ROUTED}.{name}"].bitmap + 1 for name in ("experts", "layers", "per_token")
)
_ROUTES_DATA: Final = _ROUTED_PLACES[f"{ROUTED}.data"].bitmap + 1


def _behind(path: str) -> int:
    """The buffer behind the bitmap of this column."""
    return _PLACES[path].bitmap + 1


_TOKENS, _LOGPROBS, _SAMPLER, _MASK = map(
    _behind, ("token_ids", "logprobs", "sampler_logprobs", "loss_mask")
)
_SEGMENTS: Final = _behind("segments")
_SEGMENT_PLACES: Final = tuple((_behind(f"segments[].{one.name}"), one.type) for one in SEGMENT)
_MAY_BE_NULL: Final = {
    *(field.name for field in TRAJECTORY.schema if field.nullable),
    *("logprobs[]", "sampler_logprobs[]"),
}
_NEVER_NULL: Final = itemgetter(
    *(one.bitmap for path, one in _PLACES.items() if path not in _MAY_BE_NULL)
)
"""Of the buffers' sizes."""
_NONE: Final = (0,) * (len(_PLACES) - len(_MAY_BE_NULL))

# Of the nodes: two numbers each, how long it is and how many of its entries are null.
_TOP: Final = [2 * _PLACES[name].node for name in TRAJECTORY.names]
_ENTRIES: Final = [2 * _PLACES[f"{name}[]"].node for name in LISTS - {"sampler_logprobs"}]
_NESTED: Final = [2 * one.node for path, one in _PLACES.items() if path.startswith("segments[]")]
_SURE: Final = [2 * one.node + 1 for path, one in _PLACES.items() if path not in _MAY_BE_NULL]
_LENGTHS, _COUNTS, _NULLS, _ROWS = (itemgetter(*one) for one in (_ENTRIES, _NESTED, _SURE, _TOP))
_NO_NULLS, _ONES = (0,) * len(_SURE), (1,) * len(_TOP)
LOGPROBS_NULLS: Final = 2 * _PLACES["logprobs[]"].node + 1
ENTRY_NODES: Final = tuple(_ENTRIES)
"""Of lists with an entry for every token; `nodes` has two numbers for each."""
COUNT_NODES: Final = tuple(_NESTED)
SAMPLERS_NODE: Final = 2 * _PLACES["sampler_logprobs[]"].node
SAMPLER_NULLS: Final = 2 * _PLACES["sampler_logprobs"].node + 1
REWARD_NULLS: Final = 2 * _PLACES["reward"].node + 1
_SAMPLERS: Final = itemgetter(*(2 * _PLACES["sampler_logprobs[]"].node + one for one in (0, 1)))
_NULL_ROWS: Final = itemgetter(
    *(2 * _PLACES[one.name].node + 1 for one in TRAJECTORY.schema if one.nullable)
)
_SMALL_BYTES_MAX: Final = COLUMN_BYTES_MAX // _BUFFERS
"""Buffers that lie in a body of this size cannot be too large together."""
_COPIED_BYTES_MAX: Final = 32 * 1024
"""A body is copied where that costs less than to add its place to the start of every buffer."""
_MULTIPLES_OF_8: Final = bytes(range(0, 256, 8))


class RowMetadata:
    """The metadata of a record batch as this version writes it: the same, but for its numbers."""

    def __init__(self, record: RecordLayout[Trajectory]) -> None:
        self.head = record.head
        self.routed = record is not TRAJECTORY
        _, nodes_count, self._buffers = _places(record.schema)
        raw = _some(record)
        prefix = struct.Struct("<iI")  # A message: continuation mark, bytes of its metadata.
        start = len(self.head)
        size = prefix.size + prefix.unpack_from(raw, start)[1]
        self._body = start + size
        whole = raw[start : start + size]
        message = target_of(whole, prefix.size)
        batch = target_of(whole, _slot(whole, message, 2))
        body_bytes = _slot(whole, message, 3)
        nodes = target_of(whole, _slot(whole, batch, 1)) + 4
        buffers = target_of(whole, _slot(whole, batch, 2)) + 4
        numbers = [(body_bytes, 1), (buffers, 2 * self._buffers)]
        numbers += [(nodes, 2 * nodes_count), (size, 0)]
        assert numbers == sorted(numbers), "Arrow writes its metadata in another order"
        self._same: list[tuple[int, bytes]] = []
        at, layout = 0, "<"
        for place, count in numbers:
            self._same.append((start + at, whole[at:place]))
            layout += f"{place - at}x{count}Q"  # What is negative becomes huge.
            at = place + 8 * count
        self._numbers = struct.Struct(layout)
        self._whole = whole
        self._packs = [(place, struct.Struct(f"<{count}Q")) for place, count in numbers[:3]]
        self._low_bytes = slice(start + buffers, start + buffers + 16 * self._buffers, 16)

    def numbers(
        self, raw: bytes
    ) -> tuple[bytes, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """The bytes with the body, length and nulls of each node, starts in those bytes and sizes
        of the buffers.

        Raises Unusual where anything else is not as it always is.
        """
        for at, piece in self._same:
            if not raw.startswith(piece, at):
                raise Unusual
        found = self._numbers.unpack_from(raw, len(self.head))
        count = 2 * self._buffers
        starts, sizes = found[1:count:2], found[2 : count + 1 : 2]
        if found[0] > len(raw) - self._body or max(map(add, starts, sizes)) > found[0]:
            raise Unusual
        if found[0] > _SMALL_BYTES_MAX and sum(sizes) > COLUMN_BYTES_MAX:
            raise Unusual
        if raw[self._low_bytes].translate(None, _MULTIPLES_OF_8):
            raise Unusual
        if len(raw) < _COPIED_BYTES_MAX:
            return raw[self._body :], found[count + 1 :], starts, sizes
        return raw, found[count + 1 :], tuple([self._body + each for each in starts]), sizes

    def filled(self, body_bytes: int, buffers: Sequence[int], nodes: Sequence[int]) -> bytearray:
        """The metadata with these numbers: start and size of every buffer, length and nulls of
        every node. Raises struct.error."""
        found = bytearray(self._whole)
        for (place, pack), numbers in zip(
            self._packs, ((body_bytes,), buffers, nodes), strict=True
        ):
            pack.pack_into(found, place, *numbers)
        return found


def _slot(data: bytes, table: int, slot: int) -> int:
    place = field_at(data, table, slot)
    assert place is not None, "a record batch always says this"
    return place


@cache
def row_metadata(*, routed: bool = False) -> RowMetadata:
    """That of a trajectory, or of one with routes."""
    return RowMetadata(TRAJECTORY.routed if routed else TRAJECTORY)


def _some(layout: RecordLayout[Trajectory]) -> bytes:
    """The stream of a record, whatever it says."""
    some: dict[pa.DataType, Any] = {pa.utf8(): "", pa.int64(): 0, pa.float64(): 0.0}
    some[pa.binary(32)] = bytes(32)
    values = {field.name: some.get(field.type, []) for field in layout.schema}
    if ROUTED in values:
        values[ROUTED] = {"experts": 0, "layers": 0, "per_token": 0, "data": b""}
    return decompress(layout.seal([layout.column(*one) for one in values.items()]))


class _Row:
    """The row of a stream that begins as this version writes it, checked in the making.

    `texts` remembers columns of texts. Raises Unusual, SchemaError, ValueError or struct.error
    where Arrow has to look.
    """

    __slots__ = (
        *("_at", "_nodes", "_raw", "_sizes", "_texts", "count"),
        *("digest", "length", "meta", "reward", "sampled", "segments", "trajectory", "version"),
        "routed_experts",
    )

    def __init__(
        self, raw: bytes, frame: RowMetadata, texts: dict[tuple[bytes, bytes], tuple[str, ...]]
    ) -> None:
        self._texts = texts
        self._raw, self._nodes, self._at, self._sizes = frame.numbers(raw)
        if _NEVER_NULL(self._sizes) != _NONE:
            raise Unusual
        self.length, self.count = self._list_end(_TOKENS), self._list_end(_SEGMENTS)
        if self.length > ENTRIES_MAX or self.count > SEGMENTS_MAX:
            raise Unusual
        columns = [_SEGMENT_READERS[kind](self, place) for place, kind in _SEGMENT_PLACES]
        self.segments: Sequence[Segment] = [Segment(*one) for one in zip(*columns, strict=True)]
        runs = self._runs()
        self.sampled = sum(end - start for start, end in runs)
        other = not self._nulls("sampler_logprobs")
        self._check_nodes(other)
        self._check_lists(other)
        self._check_arrays(runs, other)
        values = {name: read(self, name) for name, read in _SCALARS}
        self.trajectory: str = values["trajectory"]
        self.version: int = values["version"]
        self.digest: str = values["weights_digest"].hex()
        self.reward: float | None = values["reward"]
        self.meta = decode(values["meta_json"].encode(), META, "$.meta")
        check_fields(self)
        self.routed_experts = self._routes() if frame.routed else None
        check_routed(self)

    @property
    def loss_mask(self) -> Any:
        return np.frombuffer(self._raw, "u1", self.length, self._at[_MASK + 2])

    def _routes(self) -> Routes:
        """Their data is not copied: it is most of the record."""
        if self._nodes[_ROUTES_NODES] != _ROUTES_SURE or any(_ROUTES_NEVER_NULL(self._sizes)):
            raise Unusual
        if min(self._sizes[place] for place in _ROUTES_SIZES) < 4:
            raise Unusual
        experts, layers, per_token = (
            _INTEGER_ROWS[1].unpack_from(self._raw, self._at[place])[0] for place in _ROUTES_SIZES
        )
        end, start = self._list_end(_ROUTES_DATA), self._at[_ROUTES_DATA + 1]
        if end > self._sizes[_ROUTES_DATA + 1]:
            raise Unusual
        data: Any = memoryview(self._raw)[start : start + end]
        return Routes(experts=experts, layers=layers, per_token=per_token, data=data)

    @property
    def versions(self) -> list[int]:
        """As `Trajectory.versions`."""
        return [one.version for one in self.segments if one.kind == "model"]

    def whole(self) -> Trajectory:
        """With the arrays that were checked."""
        logprobs: Any = self._floats(_LOGPROBS)
        ids: Any = np.frombuffer(self._raw, "<i4", self.length, self._at[_TOKENS + 2])
        own = self._nulls("sampler_logprobs")
        return Trajectory(
            trajectory=self.trajectory,
            version=self.version,
            digest=self.digest,
            token_ids=ids,
            logprobs=logprobs,
            sampler_logprobs=logprobs if own else self._floats(_SAMPLER),
            loss_mask=self.loss_mask,
            reward=self.reward,
            segments=list(self.segments),
            meta=self.meta,
            routed_experts=self.routed_experts,
        )

    def _floats(self, place: int) -> Any:
        """Log-probs, NaN where the policy did not sample."""
        values = np.frombuffer(self._raw, "<f4", self.length, self._at[place + 2])
        if self.sampled == self.length:
            return values
        values = values.copy()
        for one in self.segments:
            if one.kind != "model":
                values[one.start : one.end] = np.nan
        return values

    def _nulls(self, column: str) -> int:
        return self._nodes[2 * _PLACES[column].node + 1]

    def _list_end(self, place: int) -> int:
        """The end of the only list or text of a column."""
        if self._sizes[place] < _PAIR.size:
            raise Unusual
        first, end = _PAIR.unpack_from(self._raw, self._at[place])
        if first or end < 0:
            raise Unusual
        return int(end)

    def _check_lists(self, other: bool) -> None:
        """The only list of a column goes from its first entry to the last token."""
        at, begins, whole = self._at, self._raw.startswith, _PAIR.pack(0, self.length)
        sampler = whole if other else _NOTHING
        if min(self._sizes[_LOGPROBS], self._sizes[_SAMPLER], self._sizes[_MASK]) < _PAIR.size:
            raise Unusual
        if not (begins(whole, at[_LOGPROBS]) and begins(whole, at[_MASK])):
            raise Unusual
        if not begins(sampler, at[_SAMPLER]):
            raise Unusual

    def text(self, column: str) -> str:
        """Of a column that is not null."""
        place = _behind(column)
        end, start = self._list_end(place), self._at[place + 1]
        if end > self._sizes[place + 1]:
            raise Unusual
        return self._raw[start : start + end].decode()

    def digest_bytes(self, column: str) -> bytes:
        """Of a column that is not null."""
        place = _behind(column)
        if self._sizes[place] < 32:
            raise Unusual
        return self._raw[self._at[place] : self._at[place] + 32]

    def long(self, column: str) -> int | None:
        """None for a null."""
        value: int | None = self._number(column, _LONG)
        return value

    def double(self, column: str) -> float | None:
        """None for a null."""
        value: float | None = self._number(column, _DOUBLE)
        if value is not None and not math.isfinite(value):
            raise Unusual
        return value

    def _number(self, column: str, layout: struct.Struct) -> Any:
        bitmap = _PLACES[column].bitmap
        nulls, bitmap_bytes = self._nulls(column), self._sizes[bitmap]
        if self._sizes[bitmap + 1] < layout.size or bool(nulls) != bool(bitmap_bytes):
            raise Unusual
        if not nulls:
            return layout.unpack_from(self._raw, self._at[bitmap + 1])[0]
        if self._raw[self._at[bitmap]] & 1:
            raise Unusual
        return None

    def unknown(self, column: str) -> Any:
        """A column of a type that only Arrow reads."""
        raise Unusual

    def texts(self, place: int) -> tuple[str, ...]:
        if not self.count:
            return ()
        raw, (offset, start) = self._raw, self._at[place : place + 2]
        width = 4 * self.count + 4
        offsets = raw[offset : offset + width]
        end = int.from_bytes(offsets[-4:], "little")
        if width > self._sizes[place] or end > self._sizes[place + 1]:
            raise Unusual
        key = offsets, raw[start : start + end]
        found = self._texts.get(key)
        if found is None:
            if len(self._texts) >= _TEXTS_KEPT_MAX:
                self._texts.clear()
            found = self._texts[key] = self._split(*key)
        return found

    def _split(self, offsets: bytes, data: bytes) -> tuple[str, ...]:
        ends = _INTEGER_ROWS[self.count + 1].unpack(offsets)
        if ends[0] or list(ends) != sorted(ends):
            raise Unusual
        return tuple(data[first:last].decode() for first, last in pairwise(ends))

    def integers(self, place: int) -> tuple[int, ...]:
        """An int32 for each segment."""
        if self._sizes[place] < 4 * self.count:
            raise Unusual
        return _INTEGER_ROWS[self.count].unpack_from(self._raw, self._at[place])

    def longs(self, place: int) -> tuple[int, ...]:
        """An int64 for each segment."""
        if self._sizes[place] < 8 * self.count:
            raise Unusual
        return _LONG_ROWS[self.count].unpack_from(self._raw, self._at[place])

    def flags(self, place: int) -> list[bool]:
        """A bit for each segment."""
        if 8 * self._sizes[place] < self.count:
            raise Unusual
        raw, start = self._raw, self._at[place]
        return [bool(raw[start + at // 8] >> at % 8 & 1) for at in range(self.count)]

    def _runs(self) -> list[tuple[int, int]]:
        """The model segments, of segments that tile the sequence and of a mask that says so."""
        raw, mask, length = self._raw, self._at[_MASK + 2], self.length
        if self._sizes[_MASK + 2] < length:
            raise Unusual
        at, found = 0, []
        for one in self.segments:
            end = one.end
            if one.start != at or not at <= end <= length or one.kind not in _KINDS:
                raise Unusual
            model = one.kind == "model"
            if not raw.startswith((b"\x01" if model else b"\x00") * (end - at), mask + at):
                raise Unusual
            if model:
                found.append((at, end))
            at = end
        if at != length:
            raise Unusual
        return found

    def _check_nodes(self, other: bool) -> None:
        """Lengths and nulls are those that the offsets and the segments want."""
        nodes, length, nulls = self._nodes, self.length, self.length - self.sampled
        lengths = _LENGTHS(nodes)
        if lengths != (length,) * len(_ENTRIES) or _COUNTS(nodes) != (self.count,) * len(_NESTED):
            raise Unusual
        if _NULLS(nodes) != _NO_NULLS or nodes[LOGPROBS_NULLS] != nulls:
            raise Unusual
        if _SAMPLERS(nodes) != ((length, nulls) if other else (0, 0)):
            raise Unusual
        if _ROWS(nodes) != _ONES or max(_NULL_ROWS(nodes)) > 1:
            raise Unusual

    def _check_arrays(self, runs: list[tuple[int, int]], other: bool) -> None:
        """Token ids and log-probs; where these are null, the sampler's are not `other` ones."""
        raw, at, sizes, length = self._raw, self._at, self._sizes, self.length
        if sizes[_TOKENS + 2] < 4 * length:
            raise Unusual
        token_ids = np.frombuffer(raw, "<i4", length, at[_TOKENS + 2])
        if length and np.minimum.reduce(token_ids) < 0:
            raise Unusual
        self._check_floats(_LOGPROBS, runs)
        if other:
            if sizes[_SAMPLER - 1]:
                raise Unusual
            self._check_floats(_SAMPLER, runs)
        else:
            null = sizes[_SAMPLER - 1] and not raw[at[_SAMPLER - 1]] & 1
            if not null or sizes[_SAMPLER + 1]:
                raise Unusual

    def _check_floats(self, place: int, runs: list[tuple[int, int]]) -> None:
        raw, length = self._raw, self.length
        bitmap, start = self._at[place + 1 : place + 3]
        bitmap_bytes, size = self._sizes[place + 1 : place + 3]
        if size < 4 * length:
            raise Unusual
        if self.sampled == length:
            if bitmap_bytes:
                raise Unusual
        else:
            width = (length + 7) // 8
            known = sum((1 << end) - (1 << first) for first, end in runs)
            # What the last byte says beyond the end is nobody's business.
            said = int.from_bytes(raw[bitmap : bitmap + width], "little") & ((1 << length) - 1)
            if bitmap_bytes < width or said != known:
                raise Unusual
        for first, end in runs:
            if end > first:
                _check_logprobs(raw, start + 4 * first, end - first)


def _check_logprobs(raw: bytes, start: int, count: int) -> None:
    """Finite and not above 0, first as bits: one look is enough unless there is a plain 0."""
    bits = np.frombuffer(raw, "<i4", count, start)
    if np.maximum.reduce(bits) <= _FINITE_MAX:
        return
    values = bits.view("<f4")
    # A NaN is neither: the comparison fails, too.
    if not (values.max() <= 0 and values.min() > -np.inf):
        raise Unusual


_SEGMENT_READERS: Final[dict[pa.DataType, Callable[[_Row, int], Sequence[Any]]]] = {
    pa.utf8(): _Row.texts,
    pa.int32(): _Row.integers,
    pa.int64(): _Row.longs,
    pa.bool_(): _Row.flags,
}
_READERS: Final[dict[tuple[pa.DataType, bool], Callable[[_Row, str], Any]]] = {
    (pa.utf8(), False): _Row.text,
    (pa.binary(32), False): _Row.digest_bytes,
    (pa.int64(), False): _Row.long,
    (pa.int64(), True): _Row.long,
    (pa.float64(), True): _Row.double,
}
_SCALARS: Final = [
    (field.name, _READERS.get((field.type, field.nullable), _Row.unknown))
    for field in TRAJECTORY.schema
    if field.name not in {*LISTS, "segments"}
]
