"""`audit`: proves a run from its log, from where the last audit was, or while it goes on."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.cli.audit_helper import Log, help_audit, starting
from dora_pipe.cli.audit_index import index_path, mark_of
from dora_pipe.cli.audit_tables import print_report
from dora_pipe.cli.forks import Forks
from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, say
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.errors import UsageError
from dora_pipe.history.archive_verify import raise_if_damaged, verify
from dora_pipe.history.audit import raise_if_broken
from dora_pipe.history.auditor import Auditor
from dora_pipe.history.gathering import Source
from dora_pipe.history.helpers import Helpers, helpers_for
from dora_pipe.history.index import Opened, open_index
from dora_pipe.history.report import AuditReport, plain

FOLLOW_S: Final = 1.0
"""How often a run that goes on is looked at."""

LINE_S: Final = 10.0
"""How often a line says how far this is."""

KEEP_S: Final = 60.0
"""How often a long audit writes down where it is."""

COLLECT_AFTER: Final = 50_000
"""Objects after which Python looks for cycles: books have few, and many objects."""


def audit(
    run: RunArgument,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Also look at policy files.")
    ] = True,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on while the run does; say what is found at once.")
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Digest values, but do not open them; plan nothing."),
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Look at everything again, whatever is remembered.")
    ] = False,
    index: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where to remember how far this was.")
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Prove a run from its log: C1, C2, C3 and everything they stand on. Exit code 5 if broken."""
    if follow and as_json:
        raise UsageError("--follow talks line by line: it gives no JSON")
    gc.set_threshold(COLLECT_AFTER, 20, 20)
    with Forks(help_audit) as forks, opened(run, root, archive) as open_run:
        path = index_path(open_run) if index is None else index
        look = _Look(open_run, forks, path, archive, store=store, quick=quick, fresh=fresh)
        found = look.follow() if follow else look.once()
        sealed = open_run.directory.path if open_run.directory.is_archive else archive
    if as_json:
        emit_json(plain(found))
    else:
        print_report(found)
    raise_if_broken(found)
    if sealed is not None:
        raise_if_damaged(verify(sealed))


class _Look:
    def __init__(
        self,
        run: OpenRun,
        forks: Forks,
        path: Path,
        archive: Path | None,
        *,
        store: bool,
        quick: bool,
        fresh: bool,
    ) -> None:
        self._run, self._whole, self._mark = run, not quick, mark_of(run)
        words = self._run.directory.words
        self._log = Log(run=words, archive="" if archive is None else str(archive))
        self._forks = forks
        files = store and run.has_policies
        self._opened: Opened = open_index(
            path,
            run.bus,
            run.topics,
            whole=self._whole,
            files=files,
            fresh=fresh,
            mark=self._mark,
        )
        self._kept_s = self._said_s = time.monotonic()
        self._auditor = Auditor(
            run.bus,
            run.topics,
            run.policies if files else None,
            books=self._opened.books,
            whole=self._whole,
            source=self._source,
            on_piece=self._piece,
        )
        self._violations = 0

    def once(self) -> AuditReport:
        """Up to where the log ends now."""
        try:
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
        self._keep()
        again, notes = self._opened.again, self._auditor.books.findings.notes
        if self._opened.said:
            notes.append(self._opened.said)
        if again is not None:
            note = (
                f"rounds up to {again.rounds - 1} and {again.records} records were looked at "
                "before, and were not looked at again (--fresh does)"
            )
            notes.append(note)
        return self._auditor.finish()

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
                typer.echo(one.line)
            self._violations = len(violations)
        if time.monotonic() - self._said_s >= LINE_S:
            self._said_s = time.monotonic()
            now = self._auditor.progress
            say(
                f"round {now.rounds - 1}, {now.steps} steps, {now.records} records "
                f"({now.bytes / 1e6:.1f} MB), {now.violations} violations"
            )

    def _close(self) -> None:
        self._auditor.close()
        self._opened.index.close()

    def _source(self, positions: dict[int, int], ends: dict[int, int]) -> Source | None:
        """Helpers for a long way, nobody for a short one."""
        way = sum(ends[one] - position for one, position in positions.items())
        count = helpers_for(way, len(positions))
        if not count:
            return None
        return Helpers(
            starting(self._forks, self._log),
            self._run.topics.trajectories,
            positions,
            ends,
            count=count,
            opened=self._whole,
        )
