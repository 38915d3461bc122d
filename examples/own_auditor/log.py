"""Read a log: the SQLite file, headers, trajectories."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

Json = dict[str, Any]

KEYS = {
    **dict.fromkeys(("step-committed", "batch-refused", "weights-adopted"), "trainer"),
    **dict.fromkeys(("command", "versions-dropped"), "user"),
}
"""Keys of control records by kind."""

KEY_FIELDS = {
    **dict.fromkeys(("worker-joined", "worker-ready", "worker-left"), "worker"),
    **dict.fromkeys(("request-failed", "request-released"), "trajectory"),
    **dict.fromkeys(("trajectories-logged", "group-scored"), "worker"),
    "role-started": "role",
}


class Record(NamedTuple):
    partition: int
    offset: int
    key: bytes
    headers: dict[str, str]
    value: bytes


def open_log(path: Path) -> sqlite3.Connection:
    """Open a log read-only, as one snapshot."""
    alone = not os.access(path.parent, os.W_OK) and not path.with_name(f"{path.name}-wal").exists()
    how = "mode=ro&immutable=1" if alone else "mode=ro"
    log = sqlite3.connect(f"{path.absolute().as_uri()}?{how}", uri=True, isolation_level=None)
    log.execute("BEGIN")
    return log


def records(log: sqlite3.Connection, topic: str) -> Iterator[Record]:
    """Yield records by partition and offset."""
    columns = "partition, offset, key, headers, value"
    there = "partition < (SELECT partitions FROM topics WHERE name = topic)"
    rows = log.execute(
        f"SELECT {columns} FROM log WHERE topic = ? AND {there} ORDER BY at", (topic,)
    )
    for partition, offset, key, headers, value in rows:
        yield Record(partition, offset, key, headers_of(headers), value)


def strays(log: sqlite3.Connection) -> list[tuple[int, int, int]]:
    """Return (topic id, partition, count) of records outside all partitions."""
    return log.execute(
        "SELECT at >> 52, at >> 40 & 4095, count(*) FROM records LEFT JOIN topics ON id = at >> 52 "
        "WHERE id IS NULL OR at >> 40 & 4095 >= partitions GROUP BY 1, 2"
    ).fetchall()


def key_of(fact: Json) -> str:
    """Return the allowed key of a record."""
    kind = fact["kind"]
    return KEYS.get(kind) or str(fact.get(KEY_FIELDS.get(kind), ""))


def headers_of(data: bytes | None) -> dict[str, str]:
    """Decode MessagePack: an array of pairs of str and bin."""
    if not data:
        return {}
    count, offset = _length(data, 0)
    headers: dict[str, str] = {}
    for _ in range(count):
        _, offset = _length(data, offset)  # the pair itself
        size, offset = _length(data, offset)
        name, offset = data[offset : offset + size].decode(), offset + size
        size, offset = _length(data, offset)
        headers[name], offset = data[offset : offset + size].decode("ascii"), offset + size
    return headers


def _length(data: bytes, offset: int) -> tuple[int, int]:
    """Return the declared length of an array, str or bin, and the offset of its content."""
    first = data[offset]
    if 0x90 <= first <= 0x9F:
        return first & 0x0F, offset + 1
    if 0xA0 <= first <= 0xBF:
        return first & 0x1F, offset + 1
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDC: 2}[first]
    return int.from_bytes(data[offset + 1 : offset + 1 + width], "big"), offset + 1 + width


def buried(log: sqlite3.Connection, topic: str) -> set[tuple[str, int, int]]:
    """Return the places that dead letters name."""
    letters = (record.headers.get("dead-letter") for record in records(log, topic))
    named = [json.loads(letter) for letter in letters if letter is not None]
    return {(letter["topic"], letter["partition"], letter["offset"]) for letter in named}


def whole(record: Record, store: Path) -> Record:
    """Load the value from its blob, if there is one."""
    blob = record.headers.get("blob")
    if blob is None or record.value:
        return record
    path = store / "blobs" / blob
    return record._replace(value=path.read_bytes() if path.exists() else b"")


def row_of(value: bytes) -> Json:
    source = pa.CompressedInputStream(pa.py_buffer(value), "zstd")
    with source, pa.ipc.open_stream(source) as reader:
        row: Json = reader.read_all().to_pylist()[0]
    return row | {"meta": json.loads(row["meta_json"])}
