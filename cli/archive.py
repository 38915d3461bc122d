"""`archive`: a run's log as sealed segments in a folder, so that its broker need not keep it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Final

from dora_pipe.audit.archive import Archiver, Copied, Pass, copy_policies, raise_if_damaged, verify
from dora_pipe.bus.archive.manifest import AGAIN, MANIFEST, unfinished
from dora_pipe.cli.output import emit_json, emit_line
from dora_pipe.cli.progress import progress
from dora_pipe.config.load import dump_toml
from dora_pipe.core.console import say
from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.launch.run_dir import OpenRun, RunDir, remember_archive

SETTLE_S: Final = 3.0
"""After its last decision the roles of a run say goodbye; then the last pass is made."""


def passes_of(
    run: OpenRun, to: Path, every_s: float | None, with_policies: bool
) -> Iterator[tuple[Pass, Copied | None]]:
    """One pass; with `every_s` one after the other, until the run has ended."""
    with closing(Archiver(run.bus, run.topics, to)) as archiver:
        if not (to / "config.toml").is_file() or RunDir(to).config() != run.config:
            with unfinished(RunDir(to).config_file) as config:
                config.write_text(dump_toml(run.config))
        _remember(run.directory, to)
        while True:
            with progress("archiving"):
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


def print_pass(to: Path, done: Pass, copied: Copied | None, *, as_json: bool) -> None:
    if as_json:
        emit_json({**asdict(done), "policies": None if copied is None else asdict(copied)})
        return
    for note in done.notes:
        say(f"note: {note}")
    emit_line(
        f"{to}: {done.segments} segments, {done.records} records, {done.bytes / 1e6:.1f} MB; "
        f"chain {done.head}"
    )
    if copied is not None:
        for line in copied.absent:
            say(f"note: not in the store: {line}")
        emit_line(f"{to}: {copied.files} files of policies, {copied.bytes / 1e6:.1f} MB")


def verify_archive(directory: Path, head: str, *, as_json: bool) -> None:
    """Look at every byte of an archive and say what is found. Raises where it is damaged."""
    if not RunDir(directory).is_archive:
        raise UsageError(
            f"{directory} is no archive: there is no {MANIFEST} in it",
            hint="name the folder that `dora-pipe archive RUN --to DIR` made",
        )
    with progress("looking at every byte"):
        found = verify(directory, expected=head)
    if as_json:
        emit_json(asdict(found))
    else:
        for note in found.notes:
            say(f"note: {note}")
        for problem in found.problems:
            emit_line(problem)
        emit_line(
            f"{directory}: run {found.run}, {found.segments} segments, {found.records} records, "
            f"{found.bytes / 1e6:.1f} MB of files, {found.claims} claimed values; "
            f"chain {found.head}"
        )
    raise_if_damaged(found)
