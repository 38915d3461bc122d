"""Dictionaries that move finished entries of an audit to a temporary file, so that memory depends
on what is open."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec
import zstandard

K = TypeVar("K")
V = TypeVar("V")

_TABLE: Final = """
    CREATE TABLE entries (kind TEXT, key BLOB, entry BLOB NOT NULL, PRIMARY KEY (kind, key))"""

_ENCODE: Final = msgspec.msgpack.Encoder().encode


class SpillFile:
    """Encoded entries by kind and key; the file is made for the first one."""

    def __init__(self) -> None:
        self._sql: sqlite3.Connection | None = None

    def put(self, kind: str, entries: Iterable[tuple[Any, Any]]) -> None:
        if self._sql is None:
            self._sql = sqlite3.connect("", isolation_level=None)
            self._sql.execute(_TABLE)
            self._sql.execute("BEGIN")
        compress = zstandard.ZstdCompressor(level=1).compress
        rows = [(kind, _ENCODE(key), compress(_ENCODE(entry))) for key, entry in entries]
        self._sql.executemany("INSERT INTO entries VALUES (?, ?, ?)", rows)

    def pop(self, kind: str, key: Any) -> bytes | None:
        sql = "DELETE FROM entries WHERE kind = ? AND key = ? RETURNING entry"
        rows = self._rows(sql, kind, _ENCODE(key))
        return zstandard.decompress(rows[0][0]) if rows else None

    def all(self, kind: str) -> list[bytes]:
        rows = self._rows("SELECT entry FROM entries WHERE kind = ?", kind)
        return [zstandard.decompress(entry) for (entry,) in rows]

    def close(self) -> None:
        if self._sql is not None:
            self._sql.close()

    def _rows(self, sql: str, *values: Any) -> list[tuple[bytes]]:
        return [] if self._sql is None else self._sql.execute(sql, values).fetchall()


class SpillDict(dict[K, V]):
    """Dictionary with spilled entries; iteration, `values` and `len` skip those."""

    def __init__(
        self,
        file: SpillFile,
        kind: str,
        entry: type[V],
        on_fetch: Callable[[V], None] = lambda entry: None,
    ) -> None:
        """`on_fetch` gets each loaded entry."""
        super().__init__()
        self._file, self._kind, self._on_fetch = file, kind, on_fetch
        self._decode = msgspec.msgpack.Decoder(entry).decode

    def __missing__(self, key: K) -> V:
        entry = self._fetch(key)
        if entry is None:
            raise KeyError(key)
        return entry

    def __contains__(self, key: object) -> bool:
        return dict.__contains__(self, key) or self._fetch(key) is not None

    def get(self, key: Any, default: Any = None) -> Any:
        entry: Any = dict.get(self, key)
        if entry is None:
            entry = self._fetch(key)
        return default if entry is None else entry

    def spill(self, keys: Iterable[K]) -> None:
        """Move these entries to the file."""
        present = [key for key in keys if dict.__contains__(self, key)]
        self._file.put(self._kind, [(key, self[key]) for key in present])
        for key in present:
            del self[key]

    def everything(self) -> list[V]:
        """Return all entries, which all stay where they are."""
        return [*map(self._decode, self._file.all(self._kind)), *self.values()]

    def _fetch(self, key: Any) -> V | None:
        encoded = self._file.pop(self._kind, key)
        if encoded is None:
            return None
        entry = self[key] = self._decode(encoded)
        self._on_fetch(entry)
        return entry
