"""How one row of Arrow columns becomes bytes: one zstd frame around a self-describing IPC stream.

Anyone with zstd and pyarrow reads any record: ``pa.ipc.open_stream(zstd.decompress(value))``. A
reader takes the columns it knows by name; columns of a later version are left alone. What comes
in is not trusted: the frame is opened with a bound on what may come out, a compressed Arrow body
(which has no such bound) and dictionaries are refused, and every column that is read is validated
to its last offset first.
"""

from __future__ import annotations

import array
import operator
import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import zstandard

from dora_pipe.errors import SchemaError

RAW_BYTES_MAX = 64 * 1024 * 1024
"""The stream inside a frame; 80 times a trajectory of 64 000 tokens."""

WINDOW_BYTES_MAX = 8 * 1024 * 1024
"""What a frame may ask of a reader's memory before it yields its first byte."""

COMPRESSION_LEVEL = 1
_READ_BYTES = 1024 * 1024
_ARRAY_CODES = {pa.list_(pa.int32()): "i", pa.list_(pa.uint8()): "B"}
_END_OF_STREAM = struct.pack("<iI", -1, 0)
_COMPRESSION_SLOT = 3  # of the table RecordBatch in Arrow's Message.fbs
_HEADER_SLOT = 2  # of the table Message

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

    Example: ``Layout(pa.schema([pa.field("version", pa.int64(), nullable=False)]))``.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.head = schema.serialize().to_pybytes()
        """The stream's first message; equal for every record of this version."""

    def column(self, name: str, value: Any) -> pa.Array:
        """One value as a column of one row. Raises SchemaError."""
        field = self.schema.field(name)
        kind = field.type
        if value is None and not field.nullable:
            raise SchemaError("null", path=f"$.{name}")
        try:
            return pa.array([_whole(value, kind)], kind, from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise SchemaError(_first_line(error), path=f"$.{name}") from None

    def seal(self, arrays: Sequence[pa.Array]) -> bytes:
        """Columns of one row, in the order of the schema, as bytes."""
        batch = pa.RecordBatch.from_arrays(list(arrays), schema=self.schema)
        # The same bytes as pa.ipc.new_stream writes, at a third of the time: the schema message
        # is not built again for each record.
        raw = b"".join((self.head, memoryview(batch.serialize()), _END_OF_STREAM))
        if len(raw) > RAW_BYTES_MAX:
            raise SchemaError(f"record of {len(raw)} bytes is above {RAW_BYTES_MAX}")
        return _compressor().compress(raw)

    def unseal(self, value: bytes, *, leave: Collection[str] = ()) -> Row:
        """The known columns of a record, each valid, of one row and of its type.

        Those of `leave` come as arrays alone: their plain values are for who wants them as lists.
        Raises SchemaError for anything else.
        """
        raw = decompress(value)
        same = raw.startswith(self.head)  # As this version writes it: types need no second look.
        try:
            batch = self._read(raw, same)
            if batch.num_rows != 1:
                raise SchemaError(f"{batch.num_rows} rows instead of 1")
            arrays = self._known(batch, same)
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
        messages = pa.ipc.MessageReader.open_stream(raw)
        first = _next(messages, "schema")
        schema = self.schema if same else pa.ipc.read_schema(first)
        message = _next(messages, "record batch")
        if _body_is_compressed(message.metadata.to_pybytes()):
            raise SchemaError("the Arrow body is compressed: its size cannot be bounded")
        return pa.ipc.read_record_batch(message, schema)

    def _known(self, batch: pa.RecordBatch, same: bool) -> dict[str, pa.Array]:
        found: dict[str, pa.Array] = {}
        for place, field in enumerate(self.schema):
            column = batch.column(place) if same else _find(batch, field)
            if column is None:
                continue
            column.validate(full=True)
            if column.null_count and not field.nullable:
                raise SchemaError("null", path=f"$.{field.name}")
            found[field.name] = column
        return found


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


def _whole(value: Any, kind: pa.DataType) -> Any:
    """The value, with whole numbers made sure of: Arrow would cut 1.5 to 1 without a word."""
    if pa.types.is_integer(kind):
        return operator.index(value)
    code = _ARRAY_CODES.get(kind)
    if code is None:
        return value
    plain = value.tolist() if isinstance(value, np.ndarray) else value
    return np.asarray(array.array(code, plain))


def _next(messages: pa.ipc.MessageReader, wanted: str) -> pa.ipc.Message:
    """The next message. One of another type is refused: Arrow would take it for the wanted one."""
    try:
        message = messages.read_next_message()
    except StopIteration:
        raise SchemaError(f"the stream ends before its {wanted}") from None
    if message.type != wanted:
        raise SchemaError(f"{message.type} message instead of a {wanted}")
    return message


# Made anew each time, for 9 and 7 microseconds: two threads on one of them end the process.
def _compressor() -> zstandard.ZstdCompressor:
    return zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)


def _decompressor() -> zstandard.ZstdDecompressor:
    return zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)


def decompress(value: bytes) -> bytes:
    """What one zstd frame holds, at most `RAW_BYTES_MAX`. Raises SchemaError."""
    try:
        size = zstandard.frame_content_size(value)
        if size > RAW_BYTES_MAX:
            raise SchemaError(f"frame of {size} bytes is above {RAW_BYTES_MAX}")
        if size >= 0:
            return _decompressor().decompress(value, allow_extra_data=False)
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
            if size > RAW_BYTES_MAX:
                raise SchemaError(f"frame goes on above {RAW_BYTES_MAX} bytes")
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


def _body_is_compressed(metadata: bytes) -> bool:
    """Whether a record batch message announces body compression (flatbuffers, read by hand)."""
    try:
        header = _table_field(metadata, struct.unpack_from("<I", metadata)[0], _HEADER_SLOT)
        if header is None:
            return False
        batch = header + struct.unpack_from("<I", metadata, header)[0]
        return _table_field(metadata, batch, _COMPRESSION_SLOT) is not None
    except struct.error as error:
        raise SchemaError(f"not an Arrow message: {error}") from None


def _table_field(data: bytes, table: int, slot: int) -> int | None:
    """Where a flatbuffers table keeps the field of this slot; None where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    entry = 4 + 2 * slot
    if entry + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
