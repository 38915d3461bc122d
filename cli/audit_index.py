"""Where a run's audit index lies, and which file its log is; decides nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_pipe.cli.rundir import OpenRun
from dora_pipe.history.index import FILE_NAME, look_up
from dora_pipe.history.ledger import Ledger

_SQLITE = "sqlite:"


def index_path(run: OpenRun) -> Path:
    """The file in which audits of a run remember where they were."""
    return run.directory.path / FILE_NAME


def mark_of(run: OpenRun) -> str:
    """What tells the log's file from a copy of it; empty where the log is no file."""
    url = run.directory.bus_url(run.config)
    path = Path(url.removeprefix(_SQLITE))
    if not url.startswith(_SQLITE) or not path.is_file():
        return ""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


@contextmanager
def remembered_of(run: OpenRun) -> Iterator[Ledger | None]:
    """What audit remembers of the run, for as long as the block lasts; None without an index."""
    found = look_up(index_path(run), run.bus, run.topics, mark_of(run))
    try:
        yield None if found is None else found.books.ledger
    finally:
        if found is not None:
            found.index.close()
