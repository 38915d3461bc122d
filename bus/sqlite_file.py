"""One SQLite connection to a run's log: how it is opened, locked, and its errors told.

Theory of operation. The file is in WAL mode with `synchronous=FULL`: a commit is on the disk when
it returns, readers never block writers, several processes share the file. A connection holds no
open transaction between two calls, so the write-ahead log can be copied back and reused whatever
readers are alive.

Warning. SQLite forbids to use, or even close, a connection in a forked child. Connections know the
process that opened them: in a child they refuse every use and are never closed. Nor may the child
open the same file anew: SQLite would believe that this process holds the parent's locks, take none,
and lose what it writes when the parent closes. That is refused as well.
"""

from __future__ import annotations

import os
import sqlite3
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dora_pipe.bus.checks import FORK_HINT, OpenedHere
from dora_pipe.core.durable import sync
from dora_pipe.core.errors import BusError, BusFull, LogDamaged, OutcomeUnknown

APPLICATION_ID = 0x444F5241  # "DORA", so that `file` and we recognise a log
FORMAT = 1
"""`user_version` of the file: a greater one was written by a newer dora-pipe."""

LOCK_LIMIT_S = 10.0
"""How long one call waits for the other processes' transactions."""

WAL_KEPT_BYTES = 16 * 1024 * 1024
"""The write-ahead log is cut back to this size when it is reused after a burst."""

_LOCK_WAIT_S_MAX = 0.005
_LOCK_WAIT_S_MIN = 0.0002

_SCHEMA = """
CREATE TABLE topics (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
  partitions INTEGER NOT NULL, record_bytes_max INTEGER NOT NULL
) STRICT;
CREATE TABLE writers (name TEXT PRIMARY KEY, epoch INTEGER NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE records (
  at INTEGER PRIMARY KEY, -- topic << 52 | partition << 40 | offset
  key BLOB NOT NULL, headers BLOB, value BLOB NOT NULL
) STRICT;
CREATE TABLE placed ( -- partitions of a copy, and the positions of the source that it has
  base INTEGER PRIMARY KEY, from_offset INTEGER NOT NULL, to_offset INTEGER NOT NULL
) STRICT;
CREATE VIEW log AS
  SELECT name AS topic, at >> 40 & 4095 AS partition, at & 1099511627775 AS offset,
         key, value, headers, at
  FROM records JOIN topics ON topics.id = at >> 52;
"""

_live: weakref.WeakSet[SqliteFile] = weakref.WeakSet()
_inherited: list[SqliteFile] = []


def _keep_inherited() -> None:
    """In a forked child: hold the parent's connections for ever, so that nothing closes them."""
    _inherited.extend(file for file in _live if not file.closed)


os.register_at_fork(after_in_child=_keep_inherited)


class SqliteFile:
    """A connection to a log; `create` makes the file and its tables where there are none.

    `patient` connections let SQLite wait for a lock; the others return at once, because `writing`
    waits by itself, in shorter steps.
    """

    def __init__(self, path: Path, *, create: bool = False, patient: bool = True) -> None:
        self.path = path
        self._here = OpenedHere(str(path))
        if path.resolve() in {file.path.resolve() for file in _inherited}:
            raise BusError(f"{path} was open when this process was forked", hint=FORK_HINT)
        with self.errors():
            self.connection = _connect(path, create=create)
        _live.add(self)
        self.placed: dict[int, tuple[int, int]] = {}
        """Of a copied log: begin and end of each partition, by the row of its offset 0."""
        with ExitStack() as undo, self.errors():
            undo.callback(self.close)
            self._check_format()
            self._prepare(create=create, patient=patient)
            if not self.fresh:
                found = self._retry("SELECT base, from_offset, to_offset FROM placed")
                self.placed = {base: (begin, end) for base, begin, end in found}
            undo.pop_all()

    def _check_format(self) -> None:
        """Refuse another program's file and a newer format."""
        found = self.one("PRAGMA application_id")
        self.fresh = not self.one("SELECT count(*) FROM sqlite_schema")
        if found != APPLICATION_ID and (found or not self.fresh):
            raise LogDamaged(f"{self.path} is not a log of dora-pipe")
        if self.one("PRAGMA user_version") > FORMAT:
            raise BusError(f"{self.path} was written by a newer dora-pipe")

    def _prepare(self, *, create: bool, patient: bool) -> None:
        """Set the connection up; give a fresh file its tables."""
        if create and self.fresh:
            self._retry("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = FULL")
        self.connection.execute(f"PRAGMA journal_size_limit = {WAL_KEPT_BYTES}")
        if create and self.fresh:
            self._create_tables()
        if not patient:
            self.connection.execute("PRAGMA busy_timeout = 0")

    def _create_tables(self) -> None:
        with self.writing():
            if not self.one("PRAGMA application_id"):  # else another process was faster
                for statement in _SCHEMA.split(";\n"):
                    self.connection.execute(statement)
                self.connection.execute(f"PRAGMA user_version = {FORMAT}")
                self.connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        sync(self.path.parent)
        self.fresh = False

    def one(self, statement: str, values: Sequence[object] = ()) -> Any:
        """The first column of the first row, None if there is no row."""
        row = self.connection.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def rows(self, statement: str) -> list[Any]:
        """Everything that one statement finds."""
        self.check_usable()
        with self.errors():
            return self._retry(statement).fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Everything inside sees one moment of the log."""
        self.check_usable()
        with self.errors():
            self.connection.execute("BEGIN")
            try:
                yield self.connection
            finally:
                self._roll_back()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Everything inside is on the disk when the block ends, or not at all.

        Raises BusError when other processes hold the lock for `LOCK_LIMIT_S`, BusFull, and
        OutcomeUnknown when the disk failed in the commit.
        """
        self.check_usable()
        with self.errors():
            self._retry("BEGIN IMMEDIATE")
            try:
                yield self.connection
                self._commit()
            finally:
                self._roll_back()

    def _commit(self) -> None:
        try:
            self.connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            if _primary(error) == sqlite3.SQLITE_IOERR and not _is_full(error):
                raise OutcomeUnknown(
                    f"{self.path}: the disk failed in a commit: {error}"
                ) from error
            raise

    def _roll_back(self) -> None:
        """End whatever is open; what went wrong before matters more than what goes wrong here."""
        if self.connection.in_transaction:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")

    def _retry(self, statement: str) -> sqlite3.Cursor:
        """Run a statement that needs a lock, with short waits: SQLite's own are up to 100 ms."""
        deadline_s = time.monotonic() + LOCK_LIMIT_S
        wait_s = _LOCK_WAIT_S_MIN
        while True:
            try:
                return self.connection.execute(statement)
            except sqlite3.OperationalError as error:
                if _primary(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                    raise
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LOCK_WAIT_S_MAX)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Turn SQLite's errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error

    def _translated(self, error: sqlite3.Error) -> BusError:
        match _primary(error):
            case _ if _is_full(error):
                return BusFull(f"{self.path}: no room: {error}", hint="free space on this disk")
            case sqlite3.SQLITE_BUSY:
                return BusError(f"{self.path} was locked by another process for {LOCK_LIMIT_S} s")
            case sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_CORRUPT:
                return LogDamaged(
                    f"{self.path} is damaged, or not a log of dora-pipe: {error}",
                    hint="bring it back from a copy, with its -wal file",
                )
        return BusError(f"{self.path}: {error}")

    def check_usable(self) -> None:
        """Raises BusError after `close` and in a forked child."""
        self._here.check()

    @property
    def closed(self) -> bool:
        return self._here.closed

    def close(self) -> None:
        """Close the connection; idempotent. The last one copies the write-ahead log back."""
        if self._here.close():
            self.connection.close()


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    how = "mode=rwc" if create else "mode=rw"
    if path.exists() and not os.access(path, os.W_OK) and not _wal(path).exists():
        how = "mode=ro&immutable=1"  # a finished log on a medium that nobody can write
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=LOCK_LIMIT_S,
        isolation_level=None,  # transactions are ours
        check_same_thread=False,  # one thread at a time, not the same one for ever
    )


def _wal(path: Path) -> Path:
    """Where SQLite keeps what it did not copy back yet."""
    return path.with_name(path.name + "-wal")


def _primary(error: sqlite3.Error) -> int:
    """The error's class without its details; 0 where SQLite had no part in it."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_full(error: sqlite3.Error) -> bool:
    """No room on the disk, also where only the shared-memory file could not grow."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
