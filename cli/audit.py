"""`audit`: verify a run from its log, once or continuously."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.audit.auditor import Auditor, raise_if_broken
from dora_pipe.audit.last_look import FILE_NAME, read_last_look, write_last_look
from dora_pipe.audit.reading import gc_paused
from dora_pipe.audit.report import AuditReport, plain
from dora_pipe.bus.sqlite import unreadable_records
from dora_pipe.cli.audit_tables import print_report
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line
from dora_pipe.cli.progress import CommandProgress, progress
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import OpenRun, opened

FOLLOW_S: Final = 1.0

LINE_S: Final = 10.0

_SQLITE: Final = "sqlite:"


def log_file(run: OpenRun) -> Path | None:
    url = run.directory.bus_url(run.config)
    path = Path(url.removeprefix(_SQLITE))
    return path if url.startswith(_SQLITE) and path.is_file() else None


def file_identity(run: OpenRun) -> str:
    """Return device and inode of the log's file, or ""."""
    path = log_file(run)
    if path is None:
        return ""
    stat = path.stat()
    return f"{stat.st_dev}:{stat.st_ino}"


def audit(
    run: RunArgument,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Check the files of policies, too.")
    ] = True,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Audit a live run until it ends; report violations immediately."
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check digests only; skip record contents and decisions."),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Verify the guarantees C1, C2 and C3 from the log of a run; exit code 5 if one is violated."""
    if follow and as_json:
        raise UsageError("--follow prints lines and does not support --json")
    with opened(run, root) as open_run, gc_paused():
        session = AuditSession(open_run, store=store, quick=quick)
        report = session.follow() if follow else session.once()
    emit_json(plain(report)) if as_json else print_report(report)
    raise_if_broken(report)


class AuditSession:
    """Audit of an open run."""

    def __init__(self, run: OpenRun, *, store: bool, quick: bool) -> None:
        self._run = run
        self._auditor = Auditor(
            run.bus,
            run.topics,
            run.policies if store else None,
            full=not quick,
            on_piece=lambda: self._talk(only_progress=True),
        )
        self._said_s = time.monotonic()
        self._violations = 0
        self._report: CommandProgress | None = None
        """Progress of a single audit; following prints lines instead."""

    @property
    def chain(self) -> str:
        return self._auditor.cursor.chain

    def once(self) -> AuditReport:
        """Audit to the present end of the log."""
        try:
            with progress("reading the log") as self._report:
                self._auditor.advance()
                return self._finish()
        finally:
            self._auditor.close()

    def follow(self) -> AuditReport:
        """Audit until the run ends or the user interrupts."""
        try:
            try:
                while True:
                    self._auditor.advance()
                    self._talk()
                    if self._auditor.stopped:
                        break
                    time.sleep(FOLLOW_S)
            except KeyboardInterrupt:
                say("interrupted: the run continues")
                self._auditor.advance()
            return self._finish()
        finally:
            self._auditor.close()

    def _finish(self) -> AuditReport:
        path = log_file(self._run)
        # Records in the file that belong to no topic; impossible on Kafka.
        for line in [] if path is None else unreadable_records(path):
            self._auditor.findings.add("records", "log", line)
        look_path, mark = self._run.directory.path / FILE_NAME, file_identity(self._run)
        if (last := read_last_look(look_path)) is not None:
            self._auditor.compare(last, mark)
        look = self._auditor.look(mark)
        report = self._auditor.finish()
        if look is not None and report.holds:
            write_last_look(look_path, look)
        return report

    def _talk(self, *, only_progress: bool = False) -> None:
        violations = self._auditor.findings.violations
        if not only_progress:
            for violation in violations[self._violations :]:
                emit_line(violation.line)
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
