"""The tables of an audit's index: what was put away, and the books as they were remembered.

It decides nothing: whether what is remembered may be believed is for `index` to say.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import msgspec
import zstandard

from dora_pipe.audit.audit_state import (
    AuditState,
    decode_group,
    decode_state,
    encode_group,
    encode_state,
    fingerprint,
)
from dora_pipe.audit.entries import GroupEntry, StepEntry, Taken, VersionEntry
from dora_pipe.audit.evidence import Evidence, Place
from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.identity import ORDINAL_DIGITS, Purpose, group_id

SCHEMA: Final = 2
"""Of the file; another one is thrown away."""

FILE_NAME: Final = "audit.sqlite"

NUMBER_MAX: Final = (1 << 62) - 1
ATTEMPT_BITS: Final = 20

_PURPOSES: Final[tuple[Purpose, ...]] = ("train", "eval")
_PARITIES: Final = {group_id(purpose, 0)[0]: place for place, purpose in enumerate(_PURPOSES)}
"""What a group's number says of its purpose, by the letter of its id."""

_TABLES: Final = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE groups (number INTEGER PRIMARY KEY, version INTEGER, fate TEXT, step INTEGER,
                     entry BLOB NOT NULL);
CREATE TABLE versions (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE steps (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE takes (number INTEGER PRIMARY KEY, entry BLOB NOT NULL);
CREATE TABLE waiting (part INTEGER, position INTEGER, entry BLOB NOT NULL,
                      PRIMARY KEY (part, position));
CREATE INDEX groups_by_version ON groups (version);
"""

T = TypeVar("T")


class Remembered(msgspec.Struct, frozen=True, kw_only=True):
    """Which log the books are of, and how far they go."""

    run: str
    mark: str
    """Of the log's file, where it is one: a copy has another."""
    code: str
    whole: bool
    files: bool
    control: tuple[int, str]
    """Offset and sha256 of the first control record."""
    decisions: tuple[int, str]
    """Offset and sha256 of the last round that was read."""
    rolled: tuple[tuple[int, str], tuple[int, str]]
    """Of control and of decisions: the end of what was read, and `rolled` over all of it."""
    trajectories: tuple[tuple[int, int, str], ...]
    """Partition, and offset and sha256 of the last record that was read of it."""
    records: int
    rounds: int


class AuditIndex:
    """One file; close it. Example: ``AuditIndex(Path("runs/demo/audit.sqlite"))``.

    Raises sqlite3.Error when the file cannot be used.
    """

    def __init__(self, path: Path | None, *, write: bool = True) -> None:
        self.path = path
        where = "" if path is None else str(path)  # An empty name is a file that SQLite removes.
        self._connection = sqlite3.connect(where, isolation_level=None, timeout=1.0)
        self._encode = msgspec.msgpack.Encoder().encode
        if not write:
            if self.schema != SCHEMA:
                raise sqlite3.DatabaseError("not an index of this version")
            return
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = NORMAL")
        self._connection.execute("BEGIN IMMEDIATE")
        if self.schema != SCHEMA:
            self.clear()

    def clear(self) -> None:
        """Forget everything."""
        names = self._connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        for (name,) in names.fetchall():
            self._connection.execute(f'DROP TABLE "{name}"')
        for statement in _TABLES.split(";"):
            self._connection.execute(statement)
        self._connection.execute(f"PRAGMA user_version = {SCHEMA}")

    def attach(self, books: AuditState) -> AuditState:
        """Let these books put away here what has ended; they keep no other place."""
        accounts, ledger = books.ledger.accounts, books.ledger
        accounts.attach(_Groups(self))
        ledger.versions.storage = _Table(self, "versions", VersionEntry, _whole)
        ledger.steps.storage = _Table(self, "steps", StepEntry, _whole)
        ledger.takes.storage = _Table(self, "takes", Taken, _take_number)
        books.gathering.spilled = _Waiting(self)
        return books

    def remember(self, books: AuditState, mark: str = "") -> None:
        """Keep the books as they are, with everything that was put away; only if all holds."""
        made = None if books.findings.total else _remembered(books, mark)
        if made is None:
            self._set("remembered", b"")
        elif made != self.remembered():
            self._set("books", _squeeze([encode_state(books)])[0])
            self._set("remembered", self._encode(made))
        self._connection.execute("COMMIT")
        self._connection.execute("BEGIN IMMEDIATE")

    def remembered(self) -> Remembered | None:
        """What the file says that it remembers."""
        data = self._get("remembered")
        if not data:
            return None
        with suppress(msgspec.MsgspecError):
            return msgspec.msgpack.decode(data, type=Remembered)
        return None

    def books(self) -> AuditState | None:
        """The books as they were remembered; None if they cannot be read."""
        data = self._get("books")
        if not data:
            return None
        with suppress(SchemaError, zstandard.ZstdError):
            return decode_state(zstandard.decompress(data))
        return None

    def close(self) -> None:
        """Let go of the file; what was put away since the books were kept is forgotten."""
        self._connection.close()

    def row(self, sql: str, *values: Any) -> Any:
        """The first row of a query."""
        return self._connection.execute(sql, values).fetchone()

    def rows(self, sql: str, *values: Any) -> Iterator[Any]:
        """All rows of a query."""
        return iter(self._connection.execute(sql, values))

    def write(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
        """One statement with many rows."""
        self._connection.executemany(sql, rows)

    @property
    def schema(self) -> int:
        """Version of what the file holds; 0 for a new one."""
        return int(self.row("PRAGMA user_version")[0])

    def _get(self, name: str) -> bytes:
        found = self.row("SELECT value FROM meta WHERE name = ?", name)
        return b"" if found is None else bytes(found[0])

    def _set(self, name: str, value: bytes) -> None:
        self.write("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(name, value)])


def _remembered(books: AuditState, mark: str) -> Remembered | None:
    """What the log has where the books end; None before the first round."""
    at = books.cursor
    if at.offset < 0 or at.first[0] < 0:
        return None
    return Remembered(
        run=books.ledger.run,
        mark=mark,
        code=fingerprint(),
        whole=books.whole,
        files=books.files,
        control=at.first,
        decisions=(at.offset, at.sha256),
        rolled=(
            (at.control_next, at.control_rolled),
            (at.decisions_next, at.decisions_rolled),
        ),
        trajectories=tuple(
            (partition, offset, sha256)
            for partition, (offset, sha256) in sorted(books.gathering.last.items())
        ),
        records=books.records.seen.records,
        rounds=books.ledger.rounds,
    )


class _Table(Generic[T]):
    """A `Storage` in one table, numbered by `number`; -1 for what stays in memory."""

    def __init__(
        self, index: AuditIndex, name: str, kind: type[T], number: Callable[[Any], int]
    ) -> None:
        self._index, self._name, self._number = index, name, number
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._encode = msgspec.msgpack.Encoder().encode

    def keeps(self, key: Any) -> bool:
        """Whether it has a number."""
        return self._number(key) >= 0

    def fetch(self, key: Any) -> T | None:
        """One entry."""
        number = self._number(key)
        if number < 0:
            return None
        found = self._index.row(f"SELECT entry FROM {self._name} WHERE number = ?", number)
        return None if found is None else self._decoder.decode(zstandard.decompress(found[0]))

    def store(self, entries: Iterable[tuple[Any, T]]) -> None:
        """Many entries."""
        sql = f"INSERT OR REPLACE INTO {self._name} VALUES (?, ?)"
        kept = list(entries)
        numbers = [self._number(key) for key, _ in kept]
        squeezed = _squeeze(self._encode(entry) for _, entry in kept)
        self._index.write(sql, zip(numbers, squeezed, strict=True))


class _Groups:
    """Groups by their ordinal, training and evaluation side by side."""

    def __init__(self, index: AuditIndex) -> None:
        self._index = index

    def keeps(self, key: str) -> bool:
        """Whether it is an id as identity makes them."""
        return _group_number(key) >= 0

    def fetch(self, key: str) -> GroupEntry | None:
        """One group; what counts of it is what it lists, as before."""
        number = _group_number(key)
        found = None
        if number >= 0:
            found = self._index.row("SELECT entry FROM groups WHERE number = ?", number)
        if found is None:
            return None
        return decode_group(zstandard.decompress(found[0]))

    def of_version(self, version: int) -> set[str]:
        """Ids of the groups that were sampled from a version."""
        rows = self._index.rows("SELECT number FROM groups WHERE version = ?", version)
        return {group_id(_PURPOSES[number & 1], number >> 1) for (number,) in rows}

    def store(self, entries: Iterable[tuple[str, GroupEntry]]) -> None:
        """Many groups."""
        kept = list(entries)
        squeezed = _squeeze(encode_group(group) for _, group in kept)
        rows = [
            (_group_number(name), group.spec.version, group.fate, group.step, entry)
            for (name, group), entry in zip(kept, squeezed, strict=True)
        ]
        self._index.write("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?, ?)", rows)


class _Waiting:
    """An `SpillStore`."""

    def __init__(self, index: AuditIndex) -> None:
        self._index = index
        self._decoder = msgspec.msgpack.Decoder(Evidence)
        self._encode = msgspec.msgpack.Encoder().encode

    def put(self, pieces: Iterable[Evidence]) -> None:
        """Keep these."""
        rows = [(one.partition, one.offset, self._encode(one)) for one in pieces]
        self._index.write("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", rows)

    def take(self, place: Place) -> Evidence | None:
        """Give back one."""
        sql = "DELETE FROM waiting WHERE part = ? AND position = ? RETURNING entry"
        found = self._index.row(sql, *place)
        return None if found is None else self._decoder.decode(found[0])

    def all(self) -> Iterator[Evidence]:
        """What is kept."""
        for (entry,) in self._index.rows("SELECT entry FROM waiting ORDER BY part, position"):
            yield self._decoder.decode(entry)


def _whole(key: Any) -> int:
    return key if isinstance(key, int) and 0 <= key <= NUMBER_MAX else -1


def _take_number(key: tuple[int, int]) -> int:
    step, attempt = key
    small = 0 <= attempt < 1 << ATTEMPT_BITS and 0 <= step <= NUMBER_MAX >> ATTEMPT_BITS
    return step << ATTEMPT_BITS | attempt if small else -1


def _group_number(name: str) -> int:
    """Of an id as `group_id` makes it; -1 for any other."""
    digits = name[1:]
    if len(digits) != ORDINAL_DIGITS or not (digits.isascii() and digits.isdecimal()):
        return -1
    parity = _PARITIES.get(name[0])
    return -1 if parity is None else int(digits) << 1 | parity


def _squeeze(entries: Iterable[bytes]) -> list[bytes]:
    compress = zstandard.ZstdCompressor(level=1).compress
    return [compress(entry) for entry in entries]
