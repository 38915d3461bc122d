"""How a segment's records become a file and come back: one zstd frame around an Arrow stream.

Columns: offset, key, value, header_names, header_values; a batch has at most `BATCH_BYTES` or
`BATCH_RECORDS`. Writing holds one batch, reading one segment; a file is not trusted: its size and
sha256 are those of its entry before it is opened, and no more comes out than its entry says.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, cast

import pyarrow as pa
import pyarrow.compute as pc
import zstandard

from dora_pipe.bus.archive.manifest import DAMAGED, Entry, unfinished
from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.core.errors import InvariantBroken, LogTruncated, SchemaError
from dora_pipe.schemas.arrow_frame import COMPRESSION_LEVEL, WINDOW_BYTES_MAX
from dora_pipe.schemas.arrow_message import body_is_compressed, check_schema, metadata_bytes

BATCH_BYTES: Final = 4 * 1024 * 1024
BATCH_RECORDS: Final = 4096

HEADERS_MAX: Final = 1 << 20
"""In one batch; a trajectory has fifteen."""

SCHEMA: Final = pa.schema(
    [
        pa.field("offset", pa.int64(), nullable=False),
        pa.field("key", pa.binary(), nullable=False),
        pa.field("value", pa.large_binary(), nullable=False),
        pa.field("header_names", pa.list_(pa.utf8()), nullable=False),
        pa.field("header_values", pa.list_(pa.binary()), nullable=False),
    ]
)

_HEAD: Final = SCHEMA.serialize().to_pybytes()
_PREFIX_BYTES: Final = 8
_END_OF_STREAM: Final = struct.pack("<iI", -1, 0)
# ValueError covers ArrowInvalid, KeyError ArrowKeyError, OSError ArrowSerializationError.
_UNREADABLE: Final = (
    pa.ArrowException,
    EOFError,
    KeyError,
    MemoryError,
    OSError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """What was written: for the entry."""

    records: int
    bytes: int
    file_bytes: int
    sha256: str


class _Counted:
    """What is written to a sink passes through, and is counted."""

    closed = False

    def __init__(self, sink: Any) -> None:
        self._sink = sink
        self.bytes = 0

    def write(self, data: Any) -> int:
        self.bytes += len(data)
        self._sink.write(data)
        return len(data)


class _Digested(_Counted):
    """And digested."""

    def __init__(self, sink: Any) -> None:
        super().__init__(sink)
        self.digest = hashlib.sha256()

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return super().write(data)


def write_segment(path: Path, records: Iterable[Record]) -> Written:
    """Write the file under its name, all or nothing; `records` is run through once.

    Raises BusFull, ResourceError, and whatever `records` raises: then there is no file.
    """
    count = 0
    with unfinished(path) as partial, partial.open("wb") as file:
        digested = _Digested(file)
        compressor = zstandard.ZstdCompressor(level=COMPRESSION_LEVEL, write_checksum=True)
        sink = cast("BinaryIO", digested)
        with compressor.stream_writer(sink, closefd=False) as compressed:
            raw = _Counted(compressed)
            with pa.ipc.new_stream(pa.PythonFile(raw, mode="w"), SCHEMA) as stream:
                for batch in _batches(records):
                    stream.write_batch(batch)
                    count += batch.num_rows
    return Written(
        records=count,
        bytes=raw.bytes,
        file_bytes=digested.bytes,
        sha256=digested.digest.hexdigest(),
    )


def _batches(records: Iterable[Record]) -> Iterable[pa.RecordBatch]:
    held: list[Record] = []
    held_bytes = 0
    for record in records:
        held.append(record)
        held_bytes += record_bytes(record)
        if held_bytes >= BATCH_BYTES or len(held) >= BATCH_RECORDS:
            yield _batch(held)
            held, held_bytes = [], 0
    if held:
        yield _batch(held)


def _batch(records: list[Record]) -> pa.RecordBatch:
    bounds = [0]
    names: list[str] = []
    values: list[bytes] = []
    for record in records:
        names += [name for name, _ in record.headers]
        values += [value for _, value in record.headers]
        bounds.append(len(names))
    offsets = pa.array(bounds, pa.int32())
    return pa.RecordBatch.from_arrays(
        [
            pa.array([record.offset for record in records], pa.int64()),
            pa.array([record.key for record in records], pa.binary()),
            pa.array([record.value for record in records], pa.large_binary()),
            pa.ListArray.from_arrays(offsets, pa.array(names, pa.utf8())),
            pa.ListArray.from_arrays(offsets, pa.array(values, pa.binary())),
        ],
        schema=SCHEMA,
    )


class Segment:
    """A segment in memory: Arrow batches, made into records one batch at a time."""

    def __init__(self, entry: Entry, batches: list[pa.RecordBatch]) -> None:
        self.entry = entry
        self._batches = batches
        self._lasts = [batch.column(0)[-1].as_py() for batch in batches]

    def batch_from(self, position: int) -> list[Record]:
        """The records of the batch with the first one at or after a position; none behind all."""
        batch = bisect_left(self._lasts, position)
        return records_of(self._batches[batch], self.entry.at) if batch < len(self._lasts) else []

    def claiming(self) -> Iterator[Record]:
        """The records with an empty value and headers: all that may claim one beside the log."""
        for batch in self._batches:
            empty = pc.equal(pc.binary_length(batch.column(2)), 0)
            yield from records_of(batch.filter(empty), self.entry.at)


def read_segment(path: Path, entry: Entry) -> Segment:
    """A segment whose file is what its entry says.

    Raises LogTruncated when the file is gone, InvariantBroken when it was changed.
    """
    try:
        size_bytes = path.stat().st_size
        data = path.read_bytes() if size_bytes == entry.file_bytes else b""
    except OSError as error:
        raise LogTruncated(
            f"segment {entry.file} of the archive is gone: {error.strerror}",
            hint=DAMAGED,
        ) from None
    if size_bytes != entry.file_bytes or hashlib.sha256(data).hexdigest() != entry.sha256:
        raise InvariantBroken(
            f"segment {entry.file} of the archive was changed (sha256)", hint=DAMAGED
        )
    try:
        return Segment(entry, decode_segment(data, entry))
    except SchemaError as error:
        why = f"segment {entry.file} cannot be read: {error.message}"
        raise InvariantBroken(why, hint=DAMAGED) from None


def decode_segment(data: bytes, entry: Entry) -> list[pa.RecordBatch]:
    """The batches in a file's bytes, each valid and in order. Raises SchemaError."""
    batches = [batch for batch in _batches_of(_unpacked(data, entry)) if batch.num_rows]
    count, last = 0, entry.start - 1
    for batch in batches:
        offsets = batch.column(0).to_numpy()
        rises = int(offsets[0]) > last and bool((offsets[1:] > offsets[:-1]).all())
        if not rises or offsets[-1] >= entry.end:
            raise SchemaError("its offsets are not those of its entry", path="$.offset")
        count, last = count + batch.num_rows, int(offsets[-1])
    if count != entry.records:
        raise SchemaError(f"{count} records instead of {entry.records}")
    return batches


def _batches_of(raw: bytes) -> Iterator[pa.RecordBatch]:
    """The batches of a stream of exactly our columns; their bodies are slices of `raw`."""
    stream = pa.BufferReader(raw)
    try:
        if raw.startswith(_HEAD):
            stream.seek(len(_HEAD))
        elif not _schema(raw, stream).equals(SCHEMA):
            raise SchemaError("its columns are not those of a segment")
        while (message := _message(raw, stream)) is not None:
            if message.type != "record batch" or body_is_compressed(message.metadata.to_pybytes()):
                raise SchemaError(f"{message.type} message, or a compressed body")
            batch = pa.ipc.read_record_batch(message, SCHEMA)
            _check_batch(batch)
            yield batch
    except _UNREADABLE as error:
        raise SchemaError(f"not an Arrow stream: {str(error)[:200]}") from None


def _schema(raw: bytes, stream: pa.BufferReader) -> pa.Schema:
    """As another version of Arrow writes it."""
    message = _message(raw, stream)
    if message is None or message.type != "schema":
        raise SchemaError("the stream has no schema")
    check_schema(message.metadata.to_pybytes())
    return pa.ipc.read_schema(message)


def _message(raw: bytes, stream: pa.BufferReader) -> pa.ipc.Message | None:
    """The next message, None at the end of the stream."""
    at = stream.tell()
    if raw[at : at + _PREFIX_BYTES] == _END_OF_STREAM:
        return None
    metadata_bytes(raw[at : at + _PREFIX_BYTES])
    return pa.ipc.read_message(stream)


def _check_batch(batch: pa.RecordBatch) -> None:
    batch.validate(full=True)
    names, texts = batch.column("header_names"), batch.column("header_values")
    columns = (*batch.columns, names.values, texts.values)
    if any(column.null_count for column in columns):
        raise SchemaError("null")
    if len(names.values) > HEADERS_MAX or not names.offsets.equals(texts.offsets):
        raise SchemaError("names and values of headers do not match", path="$.header_names")


def _unpacked(data: bytes, entry: Entry) -> bytes:
    decompressor = zstandard.ZstdDecompressor(max_window_size=WINDOW_BYTES_MAX)
    try:
        if zstandard.frame_content_size(data) > entry.bytes:
            raise SchemaError(f"a zstd frame of more than {entry.bytes} bytes")
        raw = decompressor.decompress(data, max_output_size=entry.bytes, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError, ValueError) as error:
        raise SchemaError(f"not a zstd frame of {entry.bytes} bytes: {error}") from None
    if len(raw) != entry.bytes:
        raise SchemaError(f"{len(raw)} bytes instead of {entry.bytes}")
    return raw


def records_of(batch: pa.RecordBatch, tp: TopicPartition) -> list[Record]:
    offsets, keys, values = (batch.column(place).to_pylist() for place in range(3))
    bounds = batch.column(3).offsets.to_pylist()
    names, texts = batch.column(3).values.to_pylist(), batch.column(4).values.to_pylist()
    pairs = list(zip(names, texts, strict=False))
    return [
        Record(
            topic=tp.topic,
            partition=tp.partition,
            offset=offset,
            key=key,
            value=value,
            headers=tuple(pairs[start:end]),
        )
        for offset, key, value, start, end in zip(
            offsets, keys, values, bounds[:-1], bounds[1:], strict=True
        )
    ]
