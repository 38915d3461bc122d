"""What an Arrow message announces, read by hand: decides what is refused before Arrow allocates.

A message's metadata is a flatbuffer, in which tables and texts may be shared: a few bytes can name
a field a million times, or nest it a hundred deep. Arrow checks that such a thing lies inside its
bytes and then builds all of it. Bodies of the other byte order are copied column by column, views
and dictionaries bring lengths of their own; nobody who writes our records needs any of that.
Slots and types are those of Arrow's Schema.fbs and Message.fbs.
"""

from __future__ import annotations

import struct
from typing import Final

from dora_pipe.core.errors import SchemaError

METADATA_BYTES_MAX: Final = 16 * 1024
"""Of one message; ours have 2 KiB. Bounds what Arrow's own check of a flatbuffer costs too."""

TABLES_MAX: Final = 512
"""Fields and their texts in a schema, each counted as often as it is named."""

DEPTH_MAX: Final = 8
"""Of a field inside fields."""

_CONTINUATION: Final = b"\xff\xff\xff\xff"
_HEADER: Final = 2  # slot of the table Message
_ENDIANNESS, _FIELDS, _SCHEMA_TEXTS = 0, 1, 2  # Schema
_TYPE_TAG, _DICTIONARY, _CHILDREN, _FIELD_TEXTS = 2, 4, 5, 6  # Field
_COMPRESSION: Final = 3  # RecordBatch
_TYPES: Final = frozenset(range(1, 22)) - {14}
"""Types that are no more than their buffers: not unions, run ends, views of texts and lists."""


def metadata_bytes(head: bytes) -> int:
    """Size of the metadata behind a message's first eight bytes.

    Raises SchemaError above the bound. Streams of before Arrow 0.15 have no continuation
    in front of the size.
    """
    at = 4 if head.startswith(_CONTINUATION) else 0
    if len(head) < at + 4:
        return 0
    size = int(struct.unpack_from("<i", head, at)[0])
    if not 0 <= size <= METADATA_BYTES_MAX:
        raise SchemaError(f"metadata of {size} bytes is above {METADATA_BYTES_MAX}")
    return size


def check_schema(metadata: bytes) -> None:
    """Raise SchemaError unless this schema is small, flat, little-endian and of plain types."""
    try:
        schema = _header(metadata)
        if schema is None:
            raise SchemaError("message without a schema")
        order = field_at(metadata, schema, _ENDIANNESS)
        if order is not None and struct.unpack_from("<h", metadata, order)[0]:
            raise SchemaError("the schema is big-endian: its columns would all be copied")
        _check_fields(metadata, schema)
    except struct.error as error:
        raise SchemaError(f"not an Arrow message: {error}") from None


def body_is_compressed(metadata: bytes) -> bool:
    """Whether a record batch announces body compression. Raises SchemaError."""
    try:
        batch = _header(metadata)
        return batch is not None and field_at(metadata, batch, _COMPRESSION) is not None
    except struct.error as error:
        raise SchemaError(f"not an Arrow message: {error}") from None


def _check_fields(data: bytes, schema: int) -> None:
    tables = len(_vector(data, schema, _SCHEMA_TEXTS))
    nested = [(field, 1) for field in _vector(data, schema, _FIELDS)]
    while nested:
        field, depth = nested.pop()
        children = _vector(data, field, _CHILDREN)
        tables += 1 + len(_vector(data, field, _FIELD_TEXTS))
        if tables + len(nested) + len(children) > TABLES_MAX:
            raise SchemaError(f"a schema of more than {TABLES_MAX} fields and texts")
        if depth > DEPTH_MAX:
            raise SchemaError(f"a schema deeper than {DEPTH_MAX}")
        _check_type(data, field)
        nested += [(child, depth + 1) for child in children]


def _check_type(data: bytes, field: int) -> None:
    place = field_at(data, field, _TYPE_TAG)
    tag = 0 if place is None else struct.unpack_from("<B", data, place)[0]
    if tag not in _TYPES or field_at(data, field, _DICTIONARY) is not None:
        raise SchemaError(f"a column of Arrow's type {tag}, or with a dictionary: not read here")


def _header(metadata: bytes) -> int | None:
    """Where the schema or the record batch of a message lies."""
    place = field_at(metadata, struct.unpack_from("<I", metadata)[0], _HEADER)
    return None if place is None else target_of(metadata, place)


def field_at(data: bytes, table: int, slot: int) -> int | None:
    """Where a flatbuffers table keeps the field of this slot; None where it is absent."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise SchemaError("not an Arrow message: a table without fields")
    entry = 4 + 2 * slot
    if entry + 2 > struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + entry)[0]
    return table + offset if offset else None


def target_of(data: bytes, place: int) -> int:
    """Where an offset at this place leads."""
    return int(place + struct.unpack_from("<I", data, place)[0])


def _vector(data: bytes, table: int, slot: int) -> list[int]:
    """Where the tables of a vector lie; empty where it is absent."""
    place = field_at(data, table, slot)
    if place is None:
        return []
    start = target_of(data, place)
    count = struct.unpack_from("<I", data, start)[0]
    if count > TABLES_MAX:
        raise SchemaError(f"a schema of more than {TABLES_MAX} fields and texts")
    return [target_of(data, start + 4 + 4 * index) for index in range(count)]
