"""Readers of rows from one file or data set, one batch at a time.

Dates and times become ISO text, decimals and durations (seconds) numbers, NaN null. Bytes, images
and infinities are rejected. CSV cells are text.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import gzip
import io
import json
import math
import mmap
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import TaskError, install_hint
from dora_pipe.producers.data.spec import DataSpec, HubSet, Source, without

BATCH_ROWS: Final = 512
"""Table rows held as Python objects at a time."""

CELL_CHARACTERS_MAX: Final = 64 * 1024 * 1024

Place = str
"""Position of a row in its file: `line 12`, `row 11`."""

Placed = tuple[Place, dict[str, Any]]

_OBJECT = msgspec.json.Decoder(dict[str, Any])
_RAWS = msgspec.json.Decoder(list[msgspec.Raw])
_BOM: Final = b"\xef\xbb\xbf"
_FORMATS: Final = (
    (b"PAR1", "parquet"),
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


def rows_of(source: Source, spec: DataSpec) -> Iterator[Placed]:
    """Yield the rows of a source and their positions. Raises TaskError naming file and position."""
    if isinstance(source, HubSet):
        return _hub_rows(source, tuple(without(spec.columns)))
    try:
        with source.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise TaskError(f"{source}: {error.strerror}") from error
    kind = next((name for magic, name in _FORMATS if head.startswith(magic)), "text")
    if kind == "parquet":
        return _table_rows(source, tuple(without(spec.columns)))
    return _text_rows(source, kind)


# Text: JSON and CSV.


def _text_rows(path: Path, packed: str) -> Iterator[Placed]:
    kind = (path.with_suffix("") if packed != "text" else path).suffix.lower()
    try:
        with contextlib.closing(_opened(path, packed)) as stream:
            if kind in (".csv", ".tsv"):
                yield from _csv_rows(path, stream, "\t" if kind == ".tsv" else ",")
            else:
                yield from _json_rows(path, stream, packed)
    except _torn() as error:
        raise TaskError(f"{path}: {error}") from error


def _torn() -> tuple[type[Exception], ...]:
    zstandard = sys.modules.get("zstandard")
    of_zstandard = () if zstandard is None else (zstandard.ZstdError,)
    return OSError, EOFError, zlib.error, *of_zstandard


def _opened(path: Path, packed: str) -> io.BufferedReader:
    if packed == "text":
        return path.open("rb")
    if packed == "gzip":
        return io.BufferedReader(gzip.open(path))
    import zstandard

    return io.BufferedReader(zstandard.open(path, "rb"))


def _json_rows(path: Path, stream: io.BufferedReader, packed: str) -> Iterator[Placed]:
    """Yield objects, one per line, or of an array if the file starts with a bracket."""
    if stream.peek(64).lstrip(_BOM + b" \t\r\n").startswith(b"["):
        yield from _array_rows(path, stream, packed)
        return
    for number, line in enumerate(stream, 1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if text.strip():
            yield f"line {number}", _object(path, f"line {number}", text)


def _array_rows(path: Path, stream: io.BufferedReader, packed: str) -> Iterator[Placed]:
    """Yield the objects of an array; the file is mapped, only their offsets are in memory."""
    data: bytes | mmap.mmap = b""
    if packed == "text":
        data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    else:
        data = stream.read()
    view = memoryview(data)
    text = view[3:] if bytes(view[:3]) == _BOM else view
    try:
        raws = _RAWS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raws = [msgspec.Raw(msgspec.json.encode(row)) for row in _of_python(path, text, error)]
    for number, raw in enumerate(raws):
        yield f"row {number}", _object(path, f"row {number}", raw)


def _object(path: Path, location: Place, text: bytes | msgspec.Raw) -> dict[str, Any]:
    try:
        return _OBJECT.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        value = _of_python(f"{path}, {location}", bytes(text), error)
        if not isinstance(value, dict):
            raise TaskError(f"{path}, {location}: {error}") from error
        return value


def _of_python(where: object, text: bytes | memoryview, why: Exception) -> Any:
    """Parse JSON as Python's `json` writes it, with NaN as null. Raises TaskError, with `why`
    for invalid JSON."""
    try:
        return json.loads(bytes(text), parse_constant=_constant)
    except (ValueError, RecursionError) as error:
        what = error if isinstance(error, _Infinite) else why
        begun = b"\n" not in bytes(text).strip() and bytes(text).lstrip().startswith(b"{")
        hint = "a row is one line; an array of objects, in [ and ], may span lines"
        cut = begun and "truncated" in str(why)
        raise TaskError(f"{where}: {what}", hint=hint if cut else None) from error


class _Infinite(ValueError):
    """Infinite number, which JSON lacks."""


def _constant(name: str) -> None:
    if name != "NaN":
        raise _Infinite(f"{name} is not a JSON number")


def _csv_rows(path: Path, stream: io.BufferedReader, delimiter: str) -> Iterator[Placed]:
    csv.field_size_limit(CELL_CHARACTERS_MAX)
    location = "line 1"
    with io.TextIOWrapper(stream, "utf-8-sig", newline="") as text:
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise TaskError(f"{path}, {location}: two columns have the same name")
            for cells in filter(None, reader):
                location = f"line {reader.line_num}"
                if len(cells) != len(names):
                    raise TaskError(
                        f"{path}, {location}: {len(cells)} cells for {len(names)} columns"
                    )
                yield location, dict(zip(names, cells, strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            raise TaskError(f"{path}, behind {location}: {error}") from error


# Tables: Parquet, the hub.


def _table_rows(path: Path, dropped: tuple[str, ...]) -> Iterator[Placed]:
    import pyarrow as pa

    try:
        yield from _rows_in(str(path), _batches(path, dropped), dropped)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        lines = str(error).splitlines()
        raise TaskError(f"{path}: {lines[0] if lines else type(error).__name__}") from error


def _batches(path: Path, dropped: tuple[str, ...]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # No read-ahead of row groups: one may be as large as the file.
    with pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20) as file:
        names = [name for name in file.schema_arrow.names if name not in dropped]
        yield from file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)


def _hub_rows(source: HubSet, dropped: tuple[str, ...]) -> Iterator[Placed]:
    try:
        from datasets import load_dataset
        from datasets.utils.logging import disable_progress_bar
    except ImportError:
        raise TaskError(
            f"{source}: `datasets` is not installed", hint=install_hint("data")
        ) from None
    disable_progress_bar()
    try:
        data = load_dataset(
            source.name, source.config or None, split=source.split, revision=source.revision or None
        )
    except (OSError, ValueError, RuntimeError, LookupError) as error:
        message = " ".join(str(error).split())
        raise TaskError(
            f"{source}: {message[:300]}",
            hint="names are OWNER/NAME:CONFIG; offline (HF_HUB_OFFLINE=1) the data set must be"
            " in the cache",
        ) from error
    yield from _rows_in(str(source), data.with_format("arrow").iter(BATCH_ROWS), dropped)


def _rows_in(where: str, batches: Iterable[Any], dropped: tuple[str, ...]) -> Iterator[Placed]:
    number = 0
    schema, needs, merged = None, dict[str, bool](), list[str]()
    for batch in batches:
        table = batch.drop_columns([name for name in dropped if name in batch.schema.names])
        if table.schema != schema:
            schema = table.schema
            needs = {field.name: _converted(where, field.name, field.type) for field in schema}
            merged = [field.name for field in schema if _is_merged(field.type)]
        for start in range(0, len(table), BATCH_ROWS):
            for row in _plain_rows(table.slice(start, BATCH_ROWS), needs):
                row |= {name: _filled(row[name]) for name in merged}
                yield f"row {number}", row
                number += 1


def _plain_rows(table: Any, needs: Mapping[str, bool]) -> Iterator[dict[str, Any]]:
    for row in _in_python(table).to_pylist(maps_as_pydicts="lossy"):
        for name, need in needs.items():
            if need:
                try:
                    row[name] = _plain(row[name])
                except _Infinite as error:
                    raise ValueError(f"column `{name}`: {error}") from None
        yield row


def _in_python(table: Any) -> Any:
    import pyarrow as pa

    fields = [field.with_type(_python_type(field.type)) for field in table.schema]
    schema = pa.schema(fields)
    return table if schema.equals(table.schema) else table.cast(schema, safe=False)


def _python_type(kind: Any) -> Any:
    import pyarrow as pa

    types = pa.types
    if types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_time64(kind):
        return pa.time64("us")
    if types.is_decimal(kind):
        return pa.float64()
    if types.is_struct(kind):
        return pa.struct([field.with_type(_python_type(field.type)) for field in kind])
    if types.is_list(kind) or types.is_large_list(kind):
        make: Callable[..., Any] = pa.list_ if types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_python_type(kind.value_type)))
    return kind


def _converted(where: str, name: str, kind: Any) -> bool:
    """Report whether values of this type need conversion. Raises TaskError if unsupported."""
    import pyarrow as pa

    types = pa.types
    leaf = kind.value_type if types.is_dictionary(kind) else kind
    if str(leaf).startswith(("binary", "large_binary", "fixed_size_binary")):
        top = name.partition(".")[0]
        raise TaskError(
            f"{where}: column `{name}` contains bytes, expected text",
            hint=f'task.columns = {{"{top}" = ""}} drops it',
        )
    inner = [kind.field(index) for index in range(kind.num_fields)]
    converted = [_converted(where, f"{name}.{field.name}", field.type) for field in inner]
    return any(converted) or not (
        types.is_boolean(kind)
        or types.is_integer(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_null(kind)
        or (types.is_nested(kind) and not types.is_map(kind))
    )


def _is_merged(kind: Any) -> bool:
    """Report whether values are messages or tool schemas: a table gives each all keys of any."""
    import pyarrow as pa

    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        return False
    item = kind.value_type
    names = {item.field(index).name for index in range(item.num_fields)}
    return bool(names & {"role", "from", "function"}) or {"name", "parameters"} <= names


def _filled(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        if math.isinf(value):
            raise _Infinite(f"{value} is not a JSON number")
        return value if value == value else None
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    return value
