"""`audit`: proves a run from its log, once or while it goes on."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.audit.auditor import Auditor, check_catalogue
from dora_pipe.audit.last_look import FILE_NAME, read_last_look, write_last_look
from dora_pipe.audit.report import AuditReport
from dora_pipe.bus.sqlite import unreadable_records
from dora_pipe.cli.output import emit_line
from dora_pipe.cli.progress import CommandProgress, progress
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.reading import saved_catalogue

FOLLOW_S: Final = 1.0
"""How often a run that goes on is looked at."""

LINE_S: Final = 10.0
"""How often a line says how far this is."""

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


class AuditSession:
    """One audit of an open run."""

    def __init__(self, run: OpenRun, *, store: bool, quick: bool) -> None:
        self._run = run
        self._auditor = Auditor(
            run.bus,
            run.topics,
            run.policies if store else None,
            whole=not quick,
            on_piece=lambda: self._talk(only_progress=True),
        )
        self._said_s = time.monotonic()
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
            self._auditor.close()

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
            self._auditor.close()

    def _finish(self) -> AuditReport:
        path = log_file(self._run)
        # What lies in the file and in no topic; Kafka cannot hold such a thing.
        for line in [] if path is None else unreadable_records(path):
            self._auditor.books.findings.add("records", "log", line)
        seen, mark = self._run.directory.path / FILE_NAME, file_identity(self._run)
        if (last := read_last_look(seen)) is not None:
            self._auditor.compare(last, mark)
        look = self._auditor.look(mark)
        self._hold_catalogue()
        report = self._auditor.finish()
        if look is not None and report.holds:
            write_last_look(seen, look)
        return report

    def _hold_catalogue(self) -> None:
        """The tables that people ask, where there are some of this very log."""
        path = self._run.directory.catalogue
        found = None if path is None else saved_catalogue(self._run.bus, self._run.topics, path)
        if found is not None:
            with closing(found):
                books = self._auditor.books
                check_catalogue(found, books.ledger, books.findings)

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
