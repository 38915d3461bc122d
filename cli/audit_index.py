"""Where a run's audit index lies, and which file its log is; decides nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dora_pipe.audit.index import FILE_NAME, look_up
from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.sqlite import unreadable_records
from dora_pipe.launch.run_dir import OpenRun

_SQLITE = "sqlite:"


def index_path(run: OpenRun) -> Path:
    """The file in which audits of a run remember where they were."""
    return run.directory.path / FILE_NAME


def mark_of(run: OpenRun) -> str:
    """What tells the log's file from a copy of it; empty where the log is no file."""
    path = _file_of(run)
    if path is None:
        return ""
    found = path.stat()
    return f"{found.st_dev}:{found.st_ino}"


def strays_of(run: OpenRun) -> list[str]:
    """What lies in the log's file and in no topic, a line each; Kafka cannot hold such a thing."""
    path = _file_of(run)
    return [] if path is None else unreadable_records(path)


def _file_of(run: OpenRun) -> Path | None:
    url = run.directory.bus_url(run.config)
    path = Path(url.removeprefix(_SQLITE))
    return path if url.startswith(_SQLITE) and path.is_file() else None


@contextmanager
def remembered_of(run: OpenRun) -> Iterator[Ledger | None]:
    """What audit remembers of the run, for as long as the block lasts; None without an index."""
    found = look_up(index_path(run), run.bus, run.topics, mark_of(run))
    try:
        yield None if found is None else found.books.ledger
    finally:
        if found is not None:
            found.index.close()
