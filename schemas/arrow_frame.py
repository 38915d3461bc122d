"""Arrow columns of one row as bytes: an IPC stream in a zstd frame.

Any reader with zstd and pyarrow can open it: ``pa.ipc.open_stream(zstd.decompress(value))``. Input
is untrusted: decompressed size and message metadata are bounded, compressed bodies rejected,
columns compared with the record's, and their bytes, entries and offsets validated.
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
"""Maximum bytes of a stream without wide columns; 80 times a trajectory of 64,000 tokens."""

FRAME_BYTES_MAX = RAW_BYTES_MAX + ROUTES_BYTES_MAX
"""Maximum bytes of a stream of unknown content."""

WINDOW_BYTES_MAX = 8 * 1024 * 1024
"""Maximum window that a frame may request."""

ENTRIES_MAX = 1 << 20
"""Maximum entries of a list of numbers: tokens of a trajectory."""

ROWS_MAX = 1 << 16
"""Maximum entries of a list of structs: segments of a trajectory, each a dict of 1 KiB."""

COLUMN_BYTES_MAX = 16 * 1024 * 1024
"""Maximum bytes of a column's buffers, counted even if shared; Python may need four times as much
for texts. `wide` columns of `Layout` may be larger."""

SHORT_BYTES = ROWS_MAX
"""A stream of at most this size passes both limits: each entry takes a byte or more, and a column
has fewer than 256 buffers, none longer than the stream."""

DECODE_BYTES_MAX = 768 * 1024 * 1024
"""Maximum memory to read one record; tested."""

COMPRESSION_LEVEL = 1
LONG_BYTES_MIN = 64 * 1024
LONG_COMPRESSION_LEVEL = -5
"""zstd level of long streams: log-probs hardly compress, and level 1 would spend most of the time
on them."""
_READ_BYTES = 1024 * 1024

METADATA_BYTES_MAX: Final = 4 * 1024
"""Maximum metadata bytes per message; ours have 2 KiB. Flatbuffers may share tables and texts:
Arrow builds up to eight fields per byte."""

_KNOWN: Final[dict[bytes, pa.Schema]] = {}
"""Cache of our schemas by first message."""

_NONE_WIDE: Final[Mapping[str, int]] = {}
_CONTINUATION: Final = b"\xff\xff\xff\xff"
_PREFIX_BYTES: Final = 8
END_OF_STREAM: Final = struct.pack("<iI", -1, 0)
_BATCH_SLOT, _COMPRESSION_SLOT = 2, 3
"""Slots of Arrow's tables Message and RecordBatch (Message.fbs)."""

# ValueError covers ArrowInvalid, KeyError ArrowKeyError, OSError ArrowSerializationError.
_UNREADABLE = (pa.ArrowException, ValueError, KeyError, TypeError, OSError, MemoryError)


class Row(NamedTuple):
    """Columns of a record, as arrays and as plain values."""

    arrays: dict[str, pa.Array]
    values: dict[str, Any]


class Layout:
    """Columns of a record kind.

    `wide` are columns that may exceed `COLUMN_BYTES_MAX`, with their limits.
    """

    def __init__(self, schema: pa.Schema, *, wide: Mapping[str, int] = _NONE_WIDE) -> None:
        self.schema = schema
        self._wide = wide
        self._raw_bytes_max = RAW_BYTES_MAX + sum(wide.values())
        self.names = tuple(schema.names)
        self._required = tuple(field.name for field in schema if not field.nullable)
        self.head = schema.serialize().to_pybytes()
        """First message of the stream, equal for all records."""
        _KNOWN[self.head] = schema

    def column(self, name: str, value: Any) -> pa.Array:
        """Return a value as a column of one row. Raises SchemaError."""
        field = self.schema.field(name)
        if value is None and not field.nullable:
            raise SchemaError("null", path=f"$.{name}")
        try:
            return _column(value, field.type)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise SchemaError(_first_line(error), path=f"$.{name}") from None

    def seal(self, arrays: Sequence[pa.Array]) -> bytes:
        """Return the bytes of one-row columns in schema order."""
        batch = pa.RecordBatch.from_arrays(list(arrays), schema=self.schema)
        # Same bytes as pa.ipc.new_stream, without rebuilding the schema message.
        raw = b"".join((self.head, memoryview(batch.serialize()), END_OF_STREAM))
        self._check_size(raw)
        if len(raw) > SHORT_BYTES:
            self._check_bytes(batch)
            self._check_entries(batch)
        return compress(raw)

    def is_of(self, raw: bytes) -> bool:
        """Return whether a stream has these columns. Raises SchemaError if it is not an Arrow
        stream."""
        return bool(_schema_of(raw)[0].equals(self.schema))

    def opened(self, raw: bytes, *, leave: Collection[str] = ()) -> Row:
        """Return the validated columns of one row. Raises SchemaError.

        Columns of `leave` have no plain values.
        """
        self._check_size(raw)
        try:
            batch = self._read(raw)
            if len(raw) > SHORT_BYTES:
                self._check_bytes(batch)
            batch.validate(full=True)
            if len(raw) > SHORT_BYTES:
                self._check_entries(batch)
            arrays = dict(zip(self.names, batch.columns, strict=True))
            for name in self._required:
                if arrays[name].null_count:
                    raise SchemaError("null", path=f"$.{name}")
            # Conversion can still raise Arrow errors.
            values = {
                name: array.to_pylist()[0] for name, array in arrays.items() if name not in leave
            }
            return Row(arrays=arrays, values=values)
        except SchemaError:
            raise
        except _UNREADABLE as error:
            raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None

    def _read(self, raw: bytes) -> pa.RecordBatch:
        schema, offset = _schema_of(raw)
        if not schema.equals(self.schema):
            raise SchemaError("columns are not those of this record")
        message = _message(raw, offset, "record batch")
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
        """Raises SchemaError for oversized columns, by declared lengths: columns may
        share bytes."""
        for name, column in zip(self.names, batch.columns, strict=True):
            size = sum(each.size for each in column.buffers() if each is not None)
            most = self._wide.get(name, COLUMN_BYTES_MAX)
            if size > most:
                raise SchemaError(f"column of {size} bytes is above {most}", path=f"$.{name}")

    def _check_entries(self, batch: pa.RecordBatch) -> None:
        """Raises SchemaError for too many entries of a valid batch."""
        for name, column in zip(self.names, batch.columns, strict=True):
            if pa.types.is_list(column.type):
                entries = len(column.values)
                most = ROWS_MAX if pa.types.is_struct(column.type.value_type) else ENTRIES_MAX
                if entries > most:
                    raise SchemaError(f"{entries} entries are above {most}", path=f"$.{name}")


def _column(value: Any, kind: pa.DataType) -> pa.Array:
    """Return a value as an array; NaN in a list of floats becomes null with a zero below."""
    if value is None:
        return pa.nulls(1, kind)
    if pa.types.is_integer(kind):
        return pa.array([operator.index(value)], kind)  # Arrow would truncate 1.5 silently
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
    """Return the schema of a stream and the offset of its first batch. Raises SchemaError."""
    end = _PREFIX_BYTES + _metadata_bytes(raw, 0, "schema")
    head = raw[:end]
    try:
        return _KNOWN.get(head) or pa.ipc.read_schema(_message(head, 0, "schema")), end
    except SchemaError:
        raise
    except _UNREADABLE as error:
        raise SchemaError(f"not an Arrow stream: {_first_line(error)}") from None


def _metadata_bytes(raw: bytes, offset: int, expected: str) -> int:
    """Return the metadata size of the message. Raises SchemaError above the bound."""
    head = raw[offset : offset + _PREFIX_BYTES]
    if len(head) < _PREFIX_BYTES or not head.startswith(_CONTINUATION):
        raise SchemaError(f"the stream has no {expected}")
    size = int(struct.unpack_from("<i", head, 4)[0])
    if not 0 < size <= METADATA_BYTES_MAX:
        raise SchemaError(f"metadata of {size} bytes is not within 1 to {METADATA_BYTES_MAX}")
    return size


def _message(raw: bytes, offset: int, expected: str) -> pa.ipc.Message:
    """Return the message at an offset; rejects other types, which Arrow would misread."""
    _metadata_bytes(raw, offset, expected)
    stream = pa.BufferReader(raw)
    stream.seek(offset)
    try:
        message = pa.ipc.read_message(stream)
    except EOFError:
        raise SchemaError(f"the stream ends before its {expected}") from None
    if message.type != expected:
        raise SchemaError(f"{message.type} message instead of a {expected}")
    return message


def _body_is_compressed(metadata: bytes) -> bool:
    """Return whether a record batch has a compressed body; only its flatbuffer says so."""
    try:
        message = struct.unpack_from("<I", metadata)[0]
        offset = _field(metadata, message, _BATCH_SLOT)
        if offset is None:
            return False
        batch = offset + struct.unpack_from("<I", metadata, offset)[0]
        return _field(metadata, batch, _COMPRESSION_SLOT) is not None
    except struct.error as error:
        raise SchemaError(f"not an Arrow message: {error}") from None


def _field(data: bytes, table: int, slot: int) -> int | None:
    """Return the offset of a flatbuffers field, None if absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise SchemaError("not an Arrow message: a table without fields")
    entry = 4 + 2 * slot
    if entry + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None


# Idle compressors: sharing one between threads crashes, and a new one costs more than a short
# record. Pop and append are atomic.
_COMPRESSORS: dict[int, list[zstandard.ZstdCompressor]] = {
    COMPRESSION_LEVEL: [],
    LONG_COMPRESSION_LEVEL: [],
}
_DECOMPRESSORS: list[zstandard.ZstdDecompressor] = []


def compress(raw: bytes) -> bytes:
    """Return one zstd frame with checksum."""
    level = COMPRESSION_LEVEL if len(raw) < LONG_BYTES_MIN else LONG_COMPRESSION_LEVEL
    try:
        compressor = _COMPRESSORS[level].pop()
    except IndexError:
        compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    frame = compressor.compress(raw)
    _COMPRESSORS[level].append(compressor)  # not reused after a failure
    return frame


def _decompress(frame: bytes) -> bytes:
    try:
        decompressor = _DECOMPRESSORS.pop()
    except IndexError:
        decompressor = _decompressor()
    raw = decompressor.decompress(frame, allow_extra_data=False)
    _DECOMPRESSORS.append(decompressor)  # not reused after a failure
    return raw


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)


def decompress(value: bytes) -> bytes:
    """Return the content of a zstd frame, at most `FRAME_BYTES_MAX`. Raises SchemaError."""
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
    """Read a frame of undeclared size in pieces, up to the bound."""
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
