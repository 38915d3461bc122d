"""`archive`: a run's log as sealed segments in a folder, so that its broker need not keep it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.bus.archive_format import AGAIN, MANIFEST, unfinished
from dora_pipe.cli.look import JsonOption, RunsOption
from dora_pipe.cli.output import emit_json, say
from dora_pipe.cli.rundir import RUNS, OpenRun, RunDir, opened, remember_archive
from dora_pipe.config.load import dump_toml
from dora_pipe.errors import ResourceError, UsageError
from dora_pipe.history.archive import Archiver, Pass
from dora_pipe.history.archive_policies import Copied, copy_policies
from dora_pipe.history.archive_verify import raise_if_damaged, verify

SETTLE_S: Final = 3.0
"""After its last decision the roles of a run say goodbye; then the last pass is made."""


def archive(
    run: Annotated[
        str, typer.Argument(help="A run's name or directory; an archive's with --verify.")
    ],
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Where the archive is, or will be.")
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Go on until the run has ended, or Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(metavar="SECONDS", min=1.0, help="Between two passes of --follow.")
    ] = 600.0,
    with_policies: Annotated[
        bool,
        typer.Option("--with-policies", help="Also what replay needs: policies, checkpoints."),
    ] = False,
    check: Annotated[
        bool, typer.Option("--verify", help="Look at every byte of an archive instead.")
    ] = False,
    head: Annotated[
        str, typer.Option(metavar="HEX", help="With --verify: this head must be in its chain.")
    ] = "",
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Seal a run's log into segments with a hash chain; go on where the archive ends."""
    if check:
        if to is not None or follow or with_policies:
            raise UsageError("--verify looks at an archive: dora-pipe archive --verify DIR")
        _verify(Path(run), head, as_json=as_json)
        return
    if to is None:
        raise UsageError("say where to: dora-pipe archive RUN --to DIR")
    with opened(run, root, alone=True) as open_run:
        if open_run.directory.is_archive:
            raise UsageError(f"{open_run.directory.path} is an archive itself")
        if (to / "config.toml").is_file() and not RunDir(to).is_archive:
            raise UsageError(
                f"{to} holds a run, not an archive", hint="an archive wants a folder of its own"
            )
        for done, copied in _passes(open_run, to, every if follow else None, with_policies):
            _tell(to, done, copied, as_json=as_json)


def _passes(
    run: OpenRun, to: Path, every_s: float | None, with_policies: bool
) -> Iterator[tuple[Pass, Copied | None]]:
    """One pass; with `every_s` one after the other, until the run has ended."""
    with closing(Archiver(run.bus, run.topics, to)) as archiver:
        if not (to / "config.toml").is_file() or RunDir(to).config() != run.config:
            with unfinished(RunDir(to).config_file) as config:
                config.write_text(dump_toml(run.config))
        _remember(run.directory, to)
        while True:
            done = archiver.once()
            yield done, _copied(run, to) if with_policies else None
            if every_s is None or archiver.finished:
                break
            time.sleep(every_s)
        if every_s is not None:
            time.sleep(SETTLE_S)
            yield archiver.once(), None


def _copied(run: OpenRun, to: Path) -> Copied:
    try:
        return copy_policies(to, run.topics, run.policies)
    except ResourceError as error:  # Its own hint is for a run that trains.
        raise ResourceError(error.message, hint=AGAIN) from error


def _remember(run: RunDir, to: Path) -> None:
    """An auditor may archive a run whose directory is not theirs to write."""
    try:
        remember_archive(run, to)
    except OSError as error:
        say(f"note: {run.path} cannot be written ({error.strerror}): say --archive DIR there")


def _tell(to: Path, done: Pass, copied: Copied | None, *, as_json: bool) -> None:
    if as_json:
        emit_json({**asdict(done), "policies": None if copied is None else asdict(copied)})
        return
    for note in done.notes:
        say(f"note: {note}")
    typer.echo(
        f"{to}: {done.segments} segments, {done.records} records, {done.bytes / 1e6:.1f} MB; "
        f"chain {done.head}"
    )
    if copied is not None:
        for line in copied.absent:
            say(f"note: not in the store: {line}")
        typer.echo(f"{to}: {copied.files} files of policies, {copied.bytes / 1e6:.1f} MB")


def _verify(directory: Path, head: str, *, as_json: bool) -> None:
    if not RunDir(directory).is_archive:
        raise UsageError(
            f"{directory} is no archive: there is no {MANIFEST} in it",
            hint="name the folder that `dora-pipe archive RUN --to DIR` made",
        )
    found = verify(directory, expected=head)
    if as_json:
        emit_json(asdict(found))
    else:
        for note in found.notes:
            say(f"note: {note}")
        for problem in found.problems:
            typer.echo(problem)
        typer.echo(
            f"{directory}: run {found.run}, {found.segments} segments, {found.records} records, "
            f"{found.bytes / 1e6:.1f} MB of files, {found.claims} claimed values; "
            f"chain {found.head}"
        )
    raise_if_damaged(found)
