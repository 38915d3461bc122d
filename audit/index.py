"""The file beside a run in which audit keeps what it has read; it decides when that is believed.

The file is disposable: without it, an audit begins at the beginning. So it does when the file was
written by other code, for another run, or in another depth; when what the log has at the remembered
places is not what was there; and whenever something was wrong, since only what holds is remembered.
A log that has become shorter than it was, or whose rounds or facts are not those that were looked
at, is reported, before it is read from the beginning.

While an audit runs, the same file holds what has ended and would fill memory: groups, versions,
steps, batches, and evidence of records that nobody has named.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
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
from dora_pipe.audit.reading import records_from, records_of
from dora_pipe.audit.round_reader import rolled
from dora_pipe.bus.port import Bus, TopicPartition
from dora_pipe.core.errors import SchemaError, TopicMissing
from dora_pipe.schemas.identity import ORDINAL_DIGITS, Purpose, group_id
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

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
        return iter(self._connection.execute(sql, values))

    def write(self, sql: str, rows: Iterable[tuple[Any, ...]]) -> None:
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
        return self._number(key) >= 0

    def fetch(self, key: Any) -> T | None:
        number = self._number(key)
        if number < 0:
            return None
        found = self._index.row(f"SELECT entry FROM {self._name} WHERE number = ?", number)
        return None if found is None else self._decoder.decode(zstandard.decompress(found[0]))

    def store(self, entries: Iterable[tuple[Any, T]]) -> None:
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
        rows = [(one.partition, one.offset, self._encode(one)) for one in pieces]
        self._index.write("INSERT OR REPLACE INTO waiting VALUES (?, ?, ?)", rows)

    def pop(self, place: Place) -> Evidence | None:
        """Give back one."""
        sql = "DELETE FROM waiting WHERE part = ? AND position = ? RETURNING entry"
        found = self._index.row(sql, *place)
        return None if found is None else self._decoder.decode(found[0])

    def all(self) -> Iterator[Evidence]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """An index with what is to be begun from; `said` is a line for people, `cut` a violation."""

    index: AuditIndex
    books: AuditState
    again: Remembered | None
    """What the books go on from; None at the beginning."""
    said: str = ""


def open_index(
    path: Path | None,
    bus: Bus,
    topics: Topics,
    *,
    whole: bool,
    files: bool,
    fresh: bool = False,
    mark: str = "",
) -> Opened:
    """The index at `path` and the books that it remembers, if the log is the one they are of.

    Without a path, or where the file cannot be used, a temporary one takes its place. `whole` and
    `files` say what is wanted: books that looked at less are not gone on with. Raises BusError.
    """
    said = ""
    index: AuditIndex | None = None
    if path is not None:
        try:
            index = AuditIndex(path)
        except sqlite3.Error as error:
            said = f"{path} cannot be used ({error}): nothing is remembered"
    if index is None:
        index = AuditIndex(None)
    remembered = None if fresh else index.remembered()
    doubt, cut = "", ""
    if remembered is not None:
        doubt = _unlike(remembered, topics, whole, files, mark)
        if not doubt:
            doubt, cut = _compare(remembered, bus, topics)
        if not doubt and not cut:
            cut = _changed(remembered, bus, topics)
        books = None if doubt or cut else index.books()
        if books is not None:
            return Opened(index=index, books=index.attach(books), again=remembered, said=said)
        said = said or (f"begins at the beginning: {doubt}" if doubt else said)
    if cut:  # What it remembers stays, so that the next look says the same.
        index.close()
        index = AuditIndex(None)
    index.clear()
    books = index.attach(AuditState(topics.run, whole=whole))
    if cut:
        books.findings.add("records", "log", cut)
    return Opened(index=index, books=books, again=None, said=said)


def look_up(path: Path, bus: Bus, topics: Topics, mark: str = "") -> Opened | None:
    """The books in a file as they were remembered, to be read; None if there are none of this log.

    Close the index when they are not needed any more.
    """
    if not path.is_file():
        return None
    with suppress(sqlite3.Error):
        index = AuditIndex(path, write=False)
        remembered = index.remembered()
        if remembered is not None and not _unlike(remembered, topics, False, False, mark):
            same = _compare(remembered, bus, topics) == ("", "")
            books = index.books() if same else None
            if books is not None:
                return Opened(index=index, books=index.attach(books), again=remembered)
        index.close()
    return None


def _unlike(one: Remembered, topics: Topics, whole: bool, files: bool, mark: str) -> str:
    """Why what is remembered is of no use here; empty if it may be."""
    if one.run != topics.run:
        return f"the index is of run {one.run}"
    if one.mark != mark:
        return "the log is another file than the one that was looked at"
    if one.code != fingerprint():
        return "the index was written by another version"
    if (whole and not one.whole) or (files and not one.files):
        return "the index was written by an audit that looked at less"
    return ""


def _compare(one: Remembered, bus: Bus, topics: Topics) -> tuple[str, str]:
    """(why the log is another one, what is gone of this one); both empty if it is all there."""
    control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
    places = {control: one.control, decisions: one.decisions}
    for partition, offset, sha256 in one.trajectories:
        places[TopicPartition(topics.trajectories, partition)] = offset, sha256
    try:
        ends = {tp: bus.end(tp) for tp in places}
    except TopicMissing:
        return "the index is of another log", ""
    there = {tp: offset for tp, (offset, _) in places.items() if offset < ends[tp]}
    found = records_from(bus, there)

    def is_there(tp: TopicPartition) -> bool:
        record, (offset, sha256) = found.get(tp), places[tp]
        same = record is not None and record.offset == offset
        return record is not None and same and sha256_hex(record.value) == sha256

    if not is_there(control):
        return "the index is of another log", ""
    for tp, (offset, _) in places.items():
        name = f"{tp.topic.removeprefix(f'{topics.run}.')}:{tp.partition}"
        if tp not in there:
            return "", f"{name} ends at {ends[tp]} and held offset {offset} when audit last looked"
        if not is_there(tp):
            return "", f"{name} has another record at offset {offset} than audit has seen there"
    return "", ""


def _changed(one: Remembered, bus: Bus, topics: Topics) -> str:
    """What is gone from the rounds and facts that were looked at, or was changed; read as bytes."""
    for topic, (end, expected) in zip((topics.control, topics.decisions), one.rolled, strict=True):
        at, name = TopicPartition(topic, 0), topic.removeprefix(f"{topics.run}.")
        if bus.end(at) < end:
            return f"{name}:0 ends at {bus.end(at)} and was read up to {end} when audit last looked"
        digest = ""
        with closing(records_of(bus, {at: end})) as records:
            for record in records:
                digest = rolled(digest, record)
        if digest != expected:
            return f"{name}:0 has other records below offset {end} than audit has seen there"
    return ""
