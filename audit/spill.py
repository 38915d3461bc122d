"""Temporary file for finished entries of an audit, so that memory depends on what is open."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Generic, TypeVar

import msgspec
import zstandard

from dora_pipe.audit.entries import StepEntry, Taken, VersionEntry
from dora_pipe.audit.evidence import Evidence, EvidenceBuffer, Place
from dora_pipe.audit.ledger import Ledger
from dora_pipe.ledger.history import GroupHistory, WorkerHistory
from dora_pipe.schemas.identity import ORDINAL_DIGITS, Purpose, group_id

NUMBER_MAX: Final = (1 << 62) - 1
ATTEMPT_BITS: Final = 20
_PURPOSES: Final[tuple[Purpose, ...]] = ("train", "eval")
_LETTERS: Final = {group_id(purpose, 0)[0]: bit for bit, purpose in enumerate(_PURPOSES)}
"""Bit of a purpose by the first letter of a group id."""

_TABLES: Final = """
CREATE TABLE groups (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE workers (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE versions (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE steps (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE takes (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE waiting (part INTEGER, position INTEGER, entry BLOB NOT NULL,
                      PRIMARY KEY (part, position));
"""

K = TypeVar("K")
T = TypeVar("T")


class SpillFile:
    def __init__(self) -> None:
        self.connection = sqlite3.connect("", isolation_level=None)
        self.connection.executescript(_TABLES)
        self.connection.execute("BEGIN")

    def attach(self, ledger: Ledger, gathering: EvidenceBuffer) -> None:
        ledger.accounts.groups.storage = _Table(self, "groups", _GroupCodec(), _group_number)
        ledger.accounts.workers.storage = _Table(
            self, "workers", _EntryCodec(WorkerHistory), _whole
        )
        ledger.versions.storage = _Table(self, "versions", _EntryCodec(VersionEntry), _whole)
        ledger.steps.storage = _Table(self, "steps", _EntryCodec(StepEntry), _whole)
        ledger.takes.storage = _Table(self, "takes", _EntryCodec(Taken), _take_number)
        gathering.spilled = _Waiting(self)

    def close(self) -> None:
        self.connection.close()


class _EntryCodec(Generic[T]):
    def __init__(self, kind: type[T]) -> None:
        self.decode = msgspec.msgpack.Decoder(kind).decode
        self.encode: Callable[[T], bytes] = msgspec.msgpack.Encoder().encode


class _GroupCodec(_EntryCodec[GroupHistory]):
    """Group with each record once; their status restores the bound ones."""

    def __init__(self) -> None:
        plain: _EntryCodec[GroupHistory] = _EntryCodec(GroupHistory)

        def encode(group: GroupHistory) -> bytes:
            for entry in group.requests.values():
                entry.bound = None
            encoded = plain.encode(group)
            _bind(group)
            return encoded

        def decode(data: Any) -> GroupHistory:
            group = plain.decode(data)
            _bind(group)
            return group

        self.encode, self.decode = encode, decode


def _bind(group: GroupHistory) -> None:
    for logged in group.records:
        if logged.status == "bound":
            group.requests[logged.fact.trajectory].bound = logged


class _Table(Generic[K, T]):
    def __init__(
        self, file: SpillFile, name: str, codec: _EntryCodec[T], number: Callable[[K], int]
    ) -> None:
        self._sql, self._codec, self._number = file.connection, codec, number
        self._select = f"SELECT entry FROM {name} WHERE number = ?"
        self._insert = f"INSERT OR REPLACE INTO {name} VALUES (?, ?)"

    def keeps(self, key: K) -> bool:
        return self._number(key) >= 0

    def fetch(self, key: K) -> T | None:
        number = self._number(key)
        row = self._sql.execute(self._select, (number,)).fetchone() if number >= 0 else None
        return None if row is None else self._codec.decode(zstandard.decompress(row[0]))

    def store(self, entries: Iterable[tuple[K, T]]) -> None:
        compress = zstandard.ZstdCompressor(level=1).compress
        rows = [(self._number(key), compress(self._codec.encode(entry))) for key, entry in entries]
        self._sql.executemany(self._insert, rows)


class _Waiting:
    def __init__(self, file: SpillFile) -> None:
        self._sql, self._codec = file.connection, _EntryCodec(Evidence)

    def put(self, pieces: Iterable[Evidence]) -> None:
        rows = [
            (evidence.partition, evidence.offset, self._codec.encode(evidence))
            for evidence in pieces
        ]
        self._sql.executemany("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", rows)

    def pop(self, key: Place) -> Evidence | None:
        sql = "DELETE FROM waiting WHERE part = ? AND position = ? RETURNING entry"
        row = self._sql.execute(sql, key).fetchone()
        return None if row is None else self._codec.decode(row[0])

    def all(self) -> Iterator[Evidence]:
        rows = self._sql.execute("SELECT entry FROM waiting ORDER BY part, position")
        return (self._codec.decode(entry) for (entry,) in rows)


def _whole(key: Any) -> int:
    return key if isinstance(key, int) and 0 <= key <= NUMBER_MAX else -1


def _take_number(key: tuple[int, int]) -> int:
    step, attempt = key
    small = 0 <= attempt < 1 << ATTEMPT_BITS and 0 <= step <= NUMBER_MAX >> ATTEMPT_BITS
    return step << ATTEMPT_BITS | attempt if small else -1


def _group_number(name: str) -> int:
    digits = name[1:]
    if len(digits) != ORDINAL_DIGITS or not (digits.isascii() and digits.isdecimal()):
        return -1
    bit = _LETTERS.get(name[0])
    return -1 if bit is None else int(digits) << 1 | bit
