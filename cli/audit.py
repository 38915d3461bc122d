"""`audit`: proves a run from its log, from where the last audit was, or while it goes on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from dora_pipe.audit.auditor import Auditor, check_catalogue
from dora_pipe.audit.evidence import EvidenceSource, Helpers, helpers_for
from dora_pipe.audit.helper import start_helper
from dora_pipe.audit.index import FILE_NAME, look_up, open_index
from dora_pipe.audit.ledger import Ledger
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.sqlite import unreadable_records
from dora_pipe.catalogue.reading import saved_catalogue
from dora_pipe.cli.output import emit_line
from dora_pipe.cli.progress import CommandProgress, progress
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun

FOLLOW_S: Final = 1.0
"""How often a run that goes on is looked at."""

LINE_S: Final = 10.0
"""How often a line says how far this is."""

KEEP_S: Final = 60.0
"""How often a long audit writes down where it is."""

COLLECT_AFTER: Final = 50_000
"""Objects after which Python looks for cycles: ledgers have few, and many objects."""

_SQLITE: Final = "sqlite:"


def log_file(run: OpenRun) -> Path | None:
    url = run.directory.bus_url(run.config)
    path = Path(url.removeprefix(_SQLITE))
    return path if url.startswith(_SQLITE) and path.is_file() else None


def file_identity(run: OpenRun) -> str:
    """What tells the log's file from a copy of it; empty where the log is no file."""
    path = log_file(run)
    if path is None:
        return ""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


@contextmanager
def remembered_ledger(run: OpenRun) -> Iterator[Ledger | None]:
    """What audit remembers of the run, for as long as the block lasts; None without an index."""
    path = run.directory.path / FILE_NAME
    found = look_up(path, run.bus, run.topics, file_identity(run))
    try:
        yield None if found is None else found.books.ledger
    finally:
        if found is not None:
            found.index.close()


class AuditSession:
    """One audit of an open run; `index` is where it remembers how far it was."""

    def __init__(
        self,
        run: OpenRun,
        index: Path | None,
        *,
        store: bool,
        quick: bool,
        fresh: bool,
    ) -> None:
        self._run, self._whole = run, not quick
        self._mark = file_identity(run)
        self._opened = open_index(
            index or run.directory.path / FILE_NAME,
            run.bus,
            run.topics,
            whole=self._whole,
            files=store,
            fresh=fresh,
            mark=self._mark,
        )
        self._kept_s = self._said_s = time.monotonic()
        self._auditor = Auditor(
            run.bus,
            run.topics,
            run.policies if store else None,
            books=self._opened.books,
            whole=self._whole,
            source=self._source,
            on_piece=self._piece,
        )
        self._violations = 0
        self._report: CommandProgress | None = None
        """Of an audit up to now; who follows is told lines."""

    @property
    def chain(self) -> str:
        """Of the last round that was read (hex)."""
        return self._auditor.books.cursor.chain

    def once(self) -> AuditReport:
        """Up to where the log ends now."""
        try:
            with progress("reading the log") as self._report:
                self._auditor.advance()
                return self._finish()
        finally:
            self._close()

    def follow(self) -> AuditReport:
        """Until the run is over, or the user has seen enough."""
        try:
            try:
                while True:
                    self._auditor.advance()
                    self._talk()
                    if self._auditor.stopped:
                        break
                    time.sleep(FOLLOW_S)
            except KeyboardInterrupt:
                say("interrupted: the run goes on")
                self._auditor.advance()
            return self._finish()
        finally:
            self._close()

    def _finish(self) -> AuditReport:
        path = log_file(self._run)
        # What lies in the file and in no topic; Kafka cannot hold such a thing.
        for line in [] if path is None else unreadable_records(path):
            self._auditor.books.findings.add("records", "log", line)
        self._keep()
        self._hold_catalogue()
        again, notes = self._opened.again, self._auditor.books.findings.notes
        if self._opened.said:
            notes.append(self._opened.said)
        if again is not None:
            notes.append(
                f"rounds up to {again.rounds - 1} and {again.records} records were looked at "
                "before, and were not looked at again (--fresh does)"
            )
        return self._auditor.finish()

    def _hold_catalogue(self) -> None:
        """The tables that people ask, where there are some of this very log."""
        path = self._run.directory.catalogue
        found = None if path is None else saved_catalogue(self._run.bus, self._run.topics, path)
        if found is not None:
            with closing(found):
                books = self._auditor.books
                check_catalogue(found, books.ledger, books.findings)

    def _keep(self) -> None:
        self._opened.index.remember(self._auditor.books, self._mark)
        self._kept_s = time.monotonic()

    def _piece(self) -> None:
        if time.monotonic() - self._kept_s >= KEEP_S:
            self._keep()
        self._talk(only_progress=True)

    def _talk(self, *, only_progress: bool = False) -> None:
        """New violations at once, progress now and then."""
        violations = self._auditor.books.findings.violations
        if not only_progress:
            for one in violations[self._violations :]:
                emit_line(one.line)
            self._violations = len(violations)
        now = self._auditor.progress
        line = (
            f"round {now.rounds - 1}, {now.steps} steps, {now.records} records "
            f"({now.bytes / 1e6:.1f} MB), {now.violations} violations"
        )
        if self._report is not None:
            self._report(line)
        elif time.monotonic() - self._said_s >= LINE_S:
            self._said_s = time.monotonic()
            say(line)

    def _close(self) -> None:
        self._auditor.close()
        self._opened.index.close()

    def _source(self, positions: dict[int, int], ends: dict[int, int]) -> EvidenceSource | None:
        """Helpers for a long way, nobody for a short one."""
        way = sum(ends[one] - position for one, position in positions.items())
        count = helpers_for(way, len(positions))
        if not count:
            return None
        return Helpers(
            partial(start_helper, self._run.log),
            self._run.topics.trajectories,
            positions,
            ends,
            count=count,
            opened=self._whole,
        )
