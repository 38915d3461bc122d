"""How one row of Arrow columns becomes bytes: one zstd frame around a self-describing IPC stream.

Anyone with zstd and pyarrow reads any record: ``pa.ipc.open_stream(zstd.decompress(value))``. A
reader takes the columns it knows by name; columns of a later version are left alone. What comes
in is not trusted: the frame is opened with a bound on what may come out, messages are looked at
before Arrow builds anything from them (`arrow_message`), and every column that is read is bounded
in its bytes and entries and validated to its last offset before it becomes Python's. A list of
empty structs is the reason: a million of them are no bytes in Arrow and 64 MB of dicts.
"""

from __future__ import annotations

import array
import operator
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.arrow_message import body_is_compressed, check_schema, metadata_bytes
from dora_pipe.schemas.routes import ROUTES_BYTES_MAX

RAW_BYTES_MAX = 64 * 1024 * 1024
"""The stream inside a frame, but for wide columns; 80 times a trajectory of 64 000 tokens."""

FRAME_BYTES_MAX = RAW_BYTES_MAX + ROUTES_BYTES_MAX
"""The stream inside a frame of which nobody knows yet what it holds."""

WINDOW_BYTES_MAX = 8 * 1024 * 1024
"""What a frame may ask of a reader's memory before it yields its first byte."""

ENTRIES_MAX = 1 << 20
"""Of a list of numbers: the tokens of one trajectory."""

ROWS_MAX = 1 << 16
"""Of a list of structs: the segments of one trajectory; each becomes a dict of 1 KiB."""

COLUMN_BYTES_MAX = 16 * 1024 * 1024
"""Of a column's buffers, each counted although they may be the same bytes; Python may need four
times as much for texts. Bytes that become Python's as they are may be more (`Layout`'s `wide`)."""

DECODE_BYTES_MAX = 768 * 1024 * 1024
"""What reading one record takes at most, the bounds above together; tests hold it."""

REPEATED_MAX = 4096
"""Columns of one number or short text that are kept, of a few hundred bytes each."""

REPEATED_CHARS_MAX = 128

COMPRESSION_LEVEL = 1

LONG_BYTES_MIN = 64 * 1024
LONG_COMPRESSION_LEVEL = -5
"""Of a stream from that size on: what it is made of (drawn log-probs) gives little, and level 1
takes most of the time of a long record to find that out."""
_READ_BYTES = 1024 * 1024
_LISTS = {
    pa.list_(one): np.dtype(one.to_pandas_dtype()) for one in (pa.int32(), pa.uint8(), pa.float32())
}
_BUFFERS = (np.ndarray, array.array, bytearray)
"""What holds numbers side by side: they go into a column as they lie there."""

_NONE_WIDE: Final[Mapping[str, int]] = {}
_PREFIX_BYTES = 8
END_OF_STREAM = struct.pack("<iI", -1, 0)

# ValueError covers ArrowInvalid, KeyError ArrowKeyError, OSError ArrowSerializationError.
_UNREADABLE = (pa.ArrowException, ValueError, KeyError, TypeError, OSError, MemoryError)


class Row(NamedTuple):
    """A record's known columns: as arrays, and the same as plain values.

    A nullable column that the writer left out is in neither.
    """

    arrays: dict[str, pa.Array]
    values: dict[str, Any]


class Layout:
    """The columns of a record kind, with what is needed once and not per record.

    `wide` are columns that may have more than `COLUMN_BYTES_MAX`, with how much.

    Example: ``Layout(pa.schema([pa.field("version", pa.int64(), nullable=False)]))``.
    """

    def __init__(self, schema: pa.Schema, *, wide: Mapping[str, int] = _NONE_WIDE) -> None:
        self.schema = schema
        self._wide = wide
        self._raw_bytes_max = RAW_BYTES_MAX + sum(wide.values())
        self.names = tuple(schema.names)
        self._required = tuple(field.name for field in schema if not field.nullable)
        self.head = schema.serialize().to_pybytes()
        """The stream's first message; equal for every record of this version."""
        # Numbers and short texts come again and again: a look-up is a tenth of making an array.
        self._repeated = lru_cache(REPEATED_MAX)(self._made)
        self._makers = {field.name: (field.type, field.nullable, _whole(field)) for field in schema}

    def column(self, name: str, value: Any) -> pa.Array:
        """One value as a column of one row. Raises SchemaError."""
        kind = type(value)
        if kind is int or (kind is str and len(value) <= REPEATED_CHARS_MAX):
            return self._repeated(name, value)
        return self._made(name, value)

    def _made(self, name: str, value: Any) -> pa.Array:
        kind, nullable, whole = self._makers[name]
        if value is None and not nullable:
            raise SchemaError("null", path=f"$.{name}")
        try:
            plain = whole(value) if whole else value
            if isinstance(plain, _BUFFERS) and (dtype := _LISTS.get(kind)):
                return _list_of(plain, kind, dtype)
            return pa.array([plain], kind, from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise SchemaError(_first_line(error), path=f"$.{name}") from None

    def seal(self, arrays: Sequence[pa.Array]) -> bytes:
        """Columns of one row, in the order of the schema, as bytes."""
        batch = pa.RecordBatch.from_arrays(list(arrays), schema=self.schema)
        # The same bytes as pa.ipc.new_stream writes, at a third of the time: the schema message
        # is not built again for each record.
        raw = b"".join((self.head, memoryview(batch.serialize()), END_OF_STREAM))
        if len(raw) > ROWS_MAX:  # In fewer bytes no column of ours has that many entries.
            for name, column in zip(self.names, arrays, strict=True):
                self._check_bytes(column, name)
                _check_entries(column, name)
        self._check_raw(raw)
        return compress(raw)

    def opened(self, raw: bytes, *, leave: Collection[str] = ()) -> Row:
        """The known columns of what a frame held, each valid, of one row and of its type.

        Those of `leave` come as arrays alone: their plain values are for who wants them as lists.
        Raises SchemaError for anything else.
        """
        self._check_raw(raw)
        same = raw.startswith(self.head)  # As this version writes it: types need no second look.
        try:
            batch = self._read(raw, same)
            if batch.num_rows != 1:
                raise SchemaError(f"{batch.num_rows} rows instead of 1")
            plain = same and len(raw) <= ROWS_MAX and _is_valid(batch)
            arrays = self._sound(batch) if plain else self._known(batch, same)
            # Here, where what Arrow finds wrong only now is still expected.
            values = {
                name: array.to_pylist()[0] for name, array in arrays.items() if name not in leave
            }
            return Row(arrays=arrays, values=values)
        except SchemaError:
            raise
        except _UNREADABLE as error:
            raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None

    def _read(self, raw: bytes, same: bool) -> pa.RecordBatch:
        stream = pa.BufferReader(raw)
        schema = self.schema
        if same:
            stream.seek(len(self.head))
        else:
            first = _next(raw, stream, "schema")
            check_schema(first.metadata.to_pybytes())
            schema = pa.ipc.read_schema(first)
        message = _next(raw, stream, "record batch")
        if body_is_compressed(message.metadata.to_pybytes()):
            raise SchemaError("the Arrow body is compressed: its size cannot be bounded")
        return pa.ipc.read_record_batch(message, schema)

    def _sound(self, batch: pa.RecordBatch) -> dict[str, pa.Array]:
        """As `_known`, of a valid batch of this version's own types, in so few bytes that no column
        can have more bytes or entries than are read: each value has some of its own."""
        found = dict(zip(self.names, batch.columns, strict=True))
        for field in self._required:
            if found[field].null_count:
                raise SchemaError("null", path=f"$.{field}")
        return found

    def _known(self, batch: pa.RecordBatch, same: bool) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        for place, field in enumerate(self.schema):
            column = batch.column(place) if same else _find(batch, field)
            if column is None:
                continue
            self._check_bytes(column, field.name)
            column.validate(full=True)
            _check_entries(column, field.name)
            if column.null_count and not field.nullable:
                raise SchemaError("null", path=f"$.{field.name}")
            found[field.name] = column
        return found

    def _check_raw(self, raw: bytes) -> None:
        """Raise SchemaError for a stream that is larger than this record may be."""
        if len(raw) > self._raw_bytes_max:
            raise SchemaError(f"record of {len(raw)} bytes is above {self._raw_bytes_max}")

    def _check_bytes(self, column: pa.Array, name: str) -> None:
        """Raise SchemaError for more bytes than are validated. Looks at declared lengths only."""
        size, most = _buffer_bytes(column), self._wide.get(name, COLUMN_BYTES_MAX)
        if size > most:
            raise SchemaError(f"column of {size} bytes is above {most}", path=f"$.{name}")


def column_names(raw: bytes) -> list[str]:
    """Names of the columns of what a frame held, whichever record it is. Raises SchemaError."""
    try:
        first = _next(raw, pa.BufferReader(raw), "schema")
        check_schema(first.metadata.to_pybytes())
        return list(pa.ipc.read_schema(first).names)
    except SchemaError:
        raise
    except _UNREADABLE as error:
        raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None


def _is_valid(batch: pa.RecordBatch) -> bool:
    """Whether all columns are; which one is not, and why, is asked of each."""
    try:
        batch.validate(full=True)
    except pa.ArrowException:
        return False
    return True


def _find(batch: pa.RecordBatch, field: pa.Field) -> pa.Array | None:
    """The column of another writer's batch; None where one that may be null is absent."""
    places = batch.schema.get_all_field_indices(field.name)
    if not places and field.nullable:
        return None
    if len(places) != 1:
        raise SchemaError(f"{len(places)} columns of this name", path=f"$.{field.name}")
    column = batch.column(places[0])
    if not _compatible(column.type, field.type):
        raise SchemaError(f"column is {column.type}, not {field.type}", path=f"$.{field.name}")
    return column


def _whole(field: pa.Field) -> Callable[[Any], Any] | None:
    """What makes sure of a column's whole numbers: Arrow would cut 1.5 to 1 without a word."""
    if pa.types.is_integer(field.type):
        return operator.index
    dtype = _LISTS.get(field.type)
    if dtype is None or dtype.kind == "f":
        return None

    def whole(value: Any) -> Any:
        if isinstance(value, _BUFFERS):
            found = np.asarray(value)
            if found.dtype == dtype:
                return found
            value = found.tolist()
        return np.asarray(array.array(dtype.char, value))

    return whole


def _list_of(numbers: Any, kind: pa.DataType, dtype: np.dtype[Any]) -> pa.Array:
    """A list column of one row; NaN becomes null. A tenth of the time of making it of objects."""
    values = np.ascontiguousarray(numbers, dtype)
    if values.ndim != 1:
        raise ValueError(f"{values.ndim} dimensions in place of one")
    there, nulls = None, 0
    if values.dtype.kind == "f" and (nulls := int(np.count_nonzero(missing := np.isnan(values)))):
        there = pa.py_buffer(np.packbits(~missing, bitorder="little"))
        values = np.where(missing, values.dtype.type(0), values)  # As Arrow has it under a null.
    entries = [there, pa.py_buffer(values)]
    column = pa.Array.from_buffers(kind.value_type, len(values), entries, null_count=nulls)
    ends = pa.py_buffer(np.array([0, len(values)], np.int32))
    return pa.Array.from_buffers(kind, 1, [None, ends], null_count=0, children=[column])


def _next(raw: bytes, stream: pa.BufferReader, wanted: str) -> pa.ipc.Message:
    """The next message. One of another type is refused: Arrow would take it for the wanted one."""
    at = stream.tell()
    metadata_bytes(raw[at : at + _PREFIX_BYTES])
    try:
        message = pa.ipc.read_message(stream)
    except EOFError:
        raise SchemaError(f"the stream ends before its {wanted}") from None
    if message.type != wanted:
        raise SchemaError(f"{message.type} message instead of a {wanted}")
    return message


# Idle ones, as many as threads were at work at once: two on one of them end the process, and a new
# one costs its pages, more than a short record does. Popping and appending are atomic.
_COMPRESSORS: dict[int, list[zstandard.ZstdCompressor]] = {
    COMPRESSION_LEVEL: [],
    LONG_COMPRESSION_LEVEL: [],
}
_DECOMPRESSORS: list[zstandard.ZstdDecompressor] = []


def compress(raw: bytes) -> bytes:
    """One zstd frame with its checksum."""
    level = COMPRESSION_LEVEL if len(raw) < LONG_BYTES_MIN else LONG_COMPRESSION_LEVEL
    try:
        one = _COMPRESSORS[level].pop()
    except IndexError:
        one = zstandard.ZstdCompressor(level=level, write_checksum=True)
    frame = one.compress(raw)
    _COMPRESSORS[level].append(one)  # One that has failed is not used again.
    return frame


def _decompress(frame: bytes) -> bytes:
    try:
        one = _DECOMPRESSORS.pop()
    except IndexError:
        one = _decompressor()
    raw = one.decompress(frame, allow_extra_data=False)
    _DECOMPRESSORS.append(one)  # One that has failed is not used again.
    return raw


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)


def decompress(value: bytes) -> bytes:
    """What one zstd frame holds, at most `FRAME_BYTES_MAX`. Raises SchemaError."""
    try:
        size = zstandard.frame_content_size(value)
        if size > FRAME_BYTES_MAX:
            raise SchemaError(f"frame of {size} bytes is above {FRAME_BYTES_MAX}")
        if size >= 0:
            return _decompress(value)
        return _stream(value)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise SchemaError(f"not a zstd frame: {_first_line(error)}") from None


def _stream(value: bytes) -> bytes:
    """A frame that does not say its size, read in pieces and given up at the bound."""
    pieces: list[bytes] = []
    size = 0
    with _decompressor().stream_reader(value) as reader:
        while piece := reader.read(_READ_BYTES):
            pieces.append(piece)
            size += len(piece)
            if size > FRAME_BYTES_MAX:
                raise SchemaError(f"frame goes on above {FRAME_BYTES_MAX} bytes")
    return b"".join(pieces)


def _compatible(found: pa.DataType, wanted: pa.DataType) -> bool:
    """Equal types; structs may have other fields than the wanted ones (evolution), by name."""
    if pa.types.is_list(wanted):
        return pa.types.is_list(found) and _compatible(found.value_type, wanted.value_type)
    if pa.types.is_struct(wanted):
        # Asking for the names here finds those that are not UTF-8 while that is still expected.
        return pa.types.is_struct(found) and all(
            _compatible(field.type, wanted.field(field.name).type)
            for field in found
            if wanted.get_field_index(field.name) >= 0
        )
    return bool(found.equals(wanted))


def _buffer_bytes(column: pa.Array) -> int:
    return sum(one.size for one in column.buffers() if one is not None)


def _check_entries(column: pa.Array, name: str) -> None:
    """Raise SchemaError for more entries than are read. The column is valid."""
    if column.type.num_fields and (entries := _entries(column)) > ENTRIES_MAX:
        raise SchemaError(f"{entries} entries are above {ENTRIES_MAX}", path=f"$.{name}")


def _entries(array: pa.Array) -> int:
    """How many values Python would make of what lies inside: all of them, null or not."""
    kind = array.type
    if isinstance(kind, pa.ListType):
        inner = array.values
        if isinstance(inner.type, pa.StructType) and len(inner) > ROWS_MAX:
            raise SchemaError(f"{len(inner)} structs in a list are above {ROWS_MAX}")
        return len(inner) + (_entries(inner) if inner.type.num_fields else 0)
    if isinstance(kind, pa.StructType):
        nested = [place for place, field in enumerate(kind) if field.type.num_fields]
        return int(len(array) * kind.num_fields) + sum(_entries(array.field(n)) for n in nested)
    raise SchemaError(f"a column of {kind} is not read here")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
