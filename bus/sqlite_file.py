"""SQLite connection to a run's log: opening, locking and errors.

WAL mode and `synchronous=FULL`: commits are on disk when they return. No transaction stays open
between calls, which would block checkpoints.

Open nothing before a fork: SQLite forbids using or closing a connection in a forked child.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from dora_pipe.bus.checks import Lifetime
from dora_pipe.core.errors import BusError, BusFull, LogDamaged, OutcomeUnknown
from dora_pipe.core.system.durable import sync

APPLICATION_ID = 0x444F5241  # "DORA", for `file`
FORMAT = 1
"""`user_version`; newer formats have greater ones."""

LOCK_LIMIT_S = 10.0
"""Maximum wait for other processes' transactions."""

WAL_KEPT_BYTES = 16 * 1024 * 1024
"""Size of the WAL after a burst."""

_LOCK_WAIT_S_MAX = 0.005
_LOCK_WAIT_S_MIN = 0.0002

_SCHEMA = """
CREATE TABLE topics (
  id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE,
  partitions INTEGER NOT NULL, max_record_bytes INTEGER NOT NULL
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


class SqliteFile:
    """Connection to a log; `create` creates missing files and tables.

    `patient` connections let SQLite wait for locks; `writing` retries in shorter steps.
    """

    def __init__(self, path: Path, *, create: bool = False, patient: bool = True) -> None:
        self.path = path
        self._lifetime = Lifetime(str(path))
        with self.errors():
            self.connection = _connect(path, create=create)
        self.placed: dict[int, tuple[int, int]] = {}
        """Begin and end of each copied partition, by the row of its offset 0."""
        with ExitStack() as undo, self.errors():
            undo.callback(self.close)
            self._check_format()
            self._prepare(create=create, patient=patient)
            if not self.fresh:
                rows = self._retry("SELECT base, from_offset, to_offset FROM placed")
                self.placed = {base: (begin, end) for base, begin, end in rows}
            undo.pop_all()

    def _check_format(self) -> None:
        application_id = self.one("PRAGMA application_id")
        self.fresh = not self.one("SELECT count(*) FROM sqlite_schema")
        if application_id != APPLICATION_ID and (application_id or not self.fresh):
            raise LogDamaged(f"{self.path} is not a log of dora-pipe")
        if self.one("PRAGMA user_version") > FORMAT:
            raise BusError(f"{self.path} was written by a newer dora-pipe")

    def _prepare(self, *, create: bool, patient: bool) -> None:
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
        row = self.connection.execute(statement, values).fetchone()
        return None if row is None else row[0]

    def rows(self, statement: str) -> list[Any]:
        self.check_usable()
        with self.errors():
            return self._retry(statement).fetchall()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Run the block on one snapshot of the log."""
        self.check_usable()
        with self.errors():
            self.connection.execute("BEGIN")
            try:
                yield self.connection
            finally:
                self._roll_back()

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one durable transaction.

        Raises BusError if locked for `LOCK_LIMIT_S`, BusFull, OutcomeUnknown if the commit's disk
        write failed.
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
        """Ignore errors, which would hide the original one."""
        if self.connection.in_transaction:
            with suppress(sqlite3.Error):
                self.connection.execute("ROLLBACK")

    def _retry(self, statement: str) -> sqlite3.Cursor:
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
                    hint="restore it from a copy, with its -wal file",
                )
        return BusError(f"{self.path}: {error}")

    def check_usable(self) -> None:
        """Raises BusError after `close`."""
        self._lifetime.check()

    @property
    def closed(self) -> bool:
        return self._lifetime.closed

    def close(self) -> None:
        """Close the connection; idempotent. The last one checkpoints the WAL."""
        if self._lifetime.close():
            self.connection.close()


def _connect(path: Path, *, create: bool) -> sqlite3.Connection:
    how = "mode=rwc" if create else "mode=rw"
    log = path.with_name(path.name + "-wal")
    if path.exists() and not os.access(path, os.W_OK) and not log.exists():
        how = "mode=ro&immutable=1"  # finished log on read-only media
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=LOCK_LIMIT_S,
        isolation_level=None,  # we manage transactions
        check_same_thread=False,  # one thread at a time, but any
    )


def _primary(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def _is_full(error: sqlite3.Error) -> bool:
    """Return whether the disk is full, also if only the shared-memory file cannot grow."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
