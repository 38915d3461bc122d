"""How one row of Arrow columns becomes bytes: one zstd frame around a self-describing IPC stream.

Anyone with zstd and pyarrow reads any record: ``pa.ipc.open_stream(zstd.decompress(value))``. What
comes in is not trusted: the frame is opened with a bound on what may come out, a message's metadata
are bounded before Arrow builds anything from them, a compressed body is refused, the columns have
to be those of the record, and each is bounded in its bytes and entries and validated to its last
offset before it becomes Python's.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.core.errors import SchemaError
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

COMPRESSION_LEVEL = 1

LONG_BYTES_MIN = 64 * 1024
LONG_COMPRESSION_LEVEL = -5
"""Of a stream from that size on: what it is made of (drawn log-probs) gives little, and level 1
takes most of the time of a long record to find that out."""
_READ_BYTES = 1024 * 1024

METADATA_BYTES_MAX: Final = 4 * 1024
"""Of one message; ours have 2 KiB. In a flatbuffer, tables and texts may be shared: Arrow builds at
most eight fields for every byte, each with at most so long a text."""

_KNOWN: Final[dict[bytes, pa.Schema]] = {}
"""Schemas of our records by their first message: they are not built again for every stream."""

_NONE_WIDE: Final[Mapping[str, int]] = {}
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_PREFIX_BYTES: Final = 8
END_OF_STREAM: Final = struct.pack("<iI", -1, 0)
_BATCH_SLOT, _COMPRESSION_SLOT = 2, 3
"""Slots of Arrow's tables Message and RecordBatch (Message.fbs)."""

# ValueError covers ArrowInvalid, KeyError ArrowKeyError, OSError ArrowSerializationError.
_UNREADABLE = (pa.ArrowException, ValueError, KeyError, TypeError, OSError, MemoryError)


class Row(NamedTuple):
    """A record's columns: as arrays, and the same as plain values."""

    arrays: dict[str, pa.Array]
    values: dict[str, Any]


class Layout:
    """The columns of a record kind.

    `wide` are columns that may have more than `COLUMN_BYTES_MAX`, with how much.

    Example: ``Layout(pa.schema([pa.field("version", pa.int64(), nullable=False)]))``.
    """

    def __init__(self, schema: pa.Schema, *, wide: Mapping[str, int] = _NONE_WIDE) -> None:
        self.schema = schema
        self._wide = wide
        self._raw_bytes_max = RAW_BYTES_MAX + sum(wide.values())
        self.names = tuple(schema.names)
        self.head = schema.serialize().to_pybytes()
        """The stream's first message; equal for every record."""
        _KNOWN[self.head] = schema

    def column(self, name: str, value: Any) -> pa.Array:
        """One value as a column of one row. Raises SchemaError."""
        field = self.schema.field(name)
        if value is None and not field.nullable:
            raise SchemaError("null", path=f"$.{name}")
        try:
            return _column(value, field.type)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise SchemaError(_first_line(error), path=f"$.{name}") from None

    def seal(self, arrays: Sequence[pa.Array]) -> bytes:
        """Columns of one row, in the order of the schema, as bytes."""
        batch = pa.RecordBatch.from_arrays(list(arrays), schema=self.schema)
        # The same bytes as pa.ipc.new_stream writes; the schema message is not built again.
        raw = b"".join((self.head, memoryview(batch.serialize()), END_OF_STREAM))
        self._check_size(raw)
        self._check_bytes(batch)
        self._check_entries(batch)
        return compress(raw)

    def is_of(self, raw: bytes) -> bool:
        """Whether what a frame held has these columns. Raises SchemaError for no Arrow stream."""
        return bool(_schema_of(raw)[0].equals(self.schema))

    def opened(self, raw: bytes, *, leave: Collection[str] = ()) -> Row:
        """The columns of what a frame held, each valid, of one row and of its type.

        Those of `leave` come as arrays alone: their plain values are for who wants them as lists.
        Raises SchemaError for anything else.
        """
        self._check_size(raw)
        try:
            batch = self._read(raw)
            self._check_bytes(batch)
            batch.validate(full=True)
            self._check_entries(batch)
            for name, array in zip(self.names, batch.columns, strict=True):
                if array.null_count and not self.schema.field(name).nullable:
                    raise SchemaError("null", path=f"$.{name}")
            arrays = dict(zip(self.names, batch.columns, strict=True))
            # Here, where what Arrow finds wrong only now is still expected.
            values = {
                name: array.to_pylist()[0] for name, array in arrays.items() if name not in leave
            }
            return Row(arrays=arrays, values=values)
        except SchemaError:
            raise
        except _UNREADABLE as error:
            raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None

    def _read(self, raw: bytes) -> pa.RecordBatch:
        """The only batch of a stream of these columns, of one row; its body is as it was sent."""
        schema, at = _schema_of(raw)
        if not schema.equals(self.schema):
            raise SchemaError("columns are not those of this record")
        message = _message(raw, at, "record batch")
        if _body_is_compressed(message.metadata.to_pybytes()):
            raise SchemaError("the Arrow body is compressed: its size cannot be bounded")
        batch = pa.ipc.read_record_batch(message, self.schema)
        if batch.num_rows != 1:
            raise SchemaError(f"{batch.num_rows} rows instead of 1")
        return batch

    def _check_size(self, raw: bytes) -> None:
        if len(raw) > self._raw_bytes_max:
            raise SchemaError(f"record of {len(raw)} bytes is above {self._raw_bytes_max}")

    def _check_bytes(self, batch: pa.RecordBatch) -> None:
        """Raise SchemaError for more than is validated. Looks at declared lengths only: columns
        may lie in the same bytes."""
        for name, column in zip(self.names, batch.columns, strict=True):
            size = sum(each.size for each in column.buffers() if each is not None)
            most = self._wide.get(name, COLUMN_BYTES_MAX)
            if size > most:
                raise SchemaError(f"column of {size} bytes is above {most}", path=f"$.{name}")

    def _check_entries(self, batch: pa.RecordBatch) -> None:
        """Raise SchemaError for more entries than are read. The batch is valid."""
        for name, column in zip(self.names, batch.columns, strict=True):
            if pa.types.is_list(column.type):
                entries = len(column.values)
                most = ROWS_MAX if pa.types.is_struct(column.type.value_type) else ENTRIES_MAX
                if entries > most:
                    raise SchemaError(f"{entries} entries are above {most}", path=f"$.{name}")


def _column(value: Any, kind: pa.DataType) -> pa.Array:
    """One value as an array; NaN of a list of floats becomes null, with a zero under it."""
    if value is None:
        return pa.nulls(1, kind)
    if pa.types.is_integer(kind):
        return pa.array([operator.index(value)], kind)  # Arrow would cut 1.5 to 1 without a word.
    if not pa.types.is_list(kind) or pa.types.is_struct(kind.value_type):
        return pa.array([value], kind)
    floats = pa.types.is_floating(kind.value_type)
    with np.errstate(over="ignore"):
        entries = np.asarray(value, np.float32 if floats else None)
    if entries.ndim != 1:
        raise ValueError(f"{entries.ndim} dimensions in place of one")
    missing = None
    if floats and np.any(nulls := np.isnan(entries)):
        missing, entries = nulls, np.where(nulls, np.float32(0), entries)
    elif not floats and entries.size and entries.dtype.kind not in "iu":
        raise TypeError("not whole numbers")
    inner = pa.array(entries, kind.value_type, mask=missing)
    return pa.ListArray.from_arrays(pa.array([0, len(inner)], pa.int32()), inner)


def _schema_of(raw: bytes) -> tuple[pa.Schema, int]:
    """The schema of a stream, and where its first batch begins. Raises SchemaError."""
    end = _PREFIX_BYTES + _metadata_bytes(raw, 0, "schema")
    head = raw[:end]
    try:
        return _KNOWN.get(head) or pa.ipc.read_schema(_message(head, 0, "schema")), end
    except SchemaError:
        raise
    except _UNREADABLE as error:
        raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None


def _metadata_bytes(raw: bytes, at: int, wanted: str) -> int:
    """Size of the metadata of the message at this place. Raises SchemaError above the bound."""
    head = raw[at : at + _PREFIX_BYTES]
    if len(head) < _PREFIX_BYTES or not head.startswith(_CONTINUATION):
        raise SchemaError(f"the stream has no {wanted}")
    size = int(struct.unpack_from("<i", head, 4)[0])
    if not 0 < size <= METADATA_BYTES_MAX:
        raise SchemaError(f"metadata of {size} bytes is not within 1 to {METADATA_BYTES_MAX}")
    return size


def _message(raw: bytes, at: int, wanted: str) -> pa.ipc.Message:
    """The message of a stream at this place.

    One of another type is refused: Arrow would take it for the wanted one.
    """
    _metadata_bytes(raw, at, wanted)
    stream = pa.BufferReader(raw)
    stream.seek(at)
    try:
        message = pa.ipc.read_message(stream)
    except EOFError:
        raise SchemaError(f"the stream ends before its {wanted}") from None
    if message.type != wanted:
        raise SchemaError(f"{message.type} message instead of a {wanted}")
    return message


def _body_is_compressed(metadata: bytes) -> bool:
    """Whether a record batch announces body compression, which only its flatbuffer tells."""
    try:
        message = struct.unpack_from("<I", metadata)[0]
        place = _field(metadata, message, _BATCH_SLOT)
        if place is None:
            return False
        batch = place + struct.unpack_from("<I", metadata, place)[0]
        return _field(metadata, batch, _COMPRESSION_SLOT) is not None
    except struct.error as error:
        raise SchemaError(f"not an Arrow message: {error}") from None


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Where a flatbuffers table keeps the field of this slot; None where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise SchemaError("not an Arrow message: a table without fields")
    entry = 4 + 2 * slot
    if entry + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None


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


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
