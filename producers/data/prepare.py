"""Preparation of rows: small data stays in memory, large data becomes one file per machine.

A file is valid while the specification and each source's size, time and inode are unchanged;
`hf:NAME` keeps its content until the file is deleted. Files are in DORA_PIPE_CACHE (default:
`dora-pipe` in the user's cache folder).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import ResourceError, TaskError
from dora_pipe.core.system.durable import sync
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.data.conversations import conversation_of
from dora_pipe.producers.data.filters import compile_filter
from dora_pipe.producers.data.readers import Placed, rows_of
from dora_pipe.producers.data.rows import DataRows, TooManyBytes, write_rows
from dora_pipe.producers.data.spec import (
    DataSpec,
    Source,
    describe_sources,
    identity,
    sources_of,
)
from dora_pipe.schemas.wire import canonical, sha256_hex

CACHE_VARIABLE: Final = "DORA_PIPE_CACHE"

MEMORY_BYTES_MAX: Final = 32 * 1024 * 1024
"""Largest rows held in memory by each task process; larger ones are mapped from a file."""

CACHE_BYTES_MAX: Final = 200 * 1024**3
"""Limit of all row files on one machine."""

REPORT_S: Final = 5.0
"""Seconds between progress reports."""

_FORM: Final = 1

Report = Callable[[str], None]

_report: ContextVar[Report] = ContextVar("report", default=lambda text: None)


@contextlib.contextmanager
def reporting(report: Report) -> Iterator[None]:
    """Send progress of preparation in this block to `report`, every few seconds."""
    token = _report.set(report)
    try:
        yield
    finally:
        _report.reset(token)


def open_rows(spec: DataSpec) -> DataRows:
    """Return the rows of a specification, preparing large ones once per machine.

    Raises TaskError naming file, row and column of unreadable data, ConfigError for an invalid
    filter, ResourceError if the cache is full.
    """
    sources = sources_of(spec)
    files = [source.stat().st_size for source in sources if isinstance(source, Path)]
    if sum(files) <= MEMORY_BYTES_MAX and len(files) == len(sources):
        buffer = io.BytesIO()
        with contextlib.suppress(TooManyBytes):
            write_rows(chosen(sources, spec), buffer, bytes_max=MEMORY_BYTES_MAX)
            return DataRows(buffer.getvalue())
    path = cache_folder() / f"{_key(sources, spec)}.rows"
    if not path.exists():
        prepare(spec, path)
    with contextlib.suppress(OSError):
        os.utime(path)  # for eviction by last use
    try:
        return DataRows.mapped(path)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from error


def cache_folder() -> Path:
    """Return the folder of row files on this machine. Raises ResourceError if there is none."""
    own = os.environ.get(CACHE_VARIABLE)
    if own:
        return Path(own) / "data"
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError as error:  # no home directory
        raise ResourceError(str(error), hint=f"{CACHE_VARIABLE} names a folder for data") from error
    return folder / "dora-pipe" / "data"


def chosen(sources: Sequence[Source], spec: DataSpec) -> Iterator[Placed]:
    """Yield the selected rows with file and position."""
    keeps = compile_filter(spec.filter) if spec.filter else None
    for source in sources:
        for location, given in rows_of(source, spec):
            where = f"{source}, {location}"
            try:
                row = _renamed(given, spec)
                kept = (keeps is None or keeps(row)) and _on_this_side(row, spec)
                if kept and spec.prompt:
                    _check_prompt(row, spec.prompt)
            except TaskError as error:
                raise TaskError(
                    f"{source}, {location}: {error.message}", hint=error.hint
                ) from error
            if kept:
                yield where, row


def _renamed(row: dict[str, Any], spec: DataSpec) -> dict[str, Any]:
    if not spec.columns:
        return row
    for old in spec.columns.values():
        if old and old not in row:
            raise TaskError(f"no column `{old}`", hint=nearest(old, row) or _columns(row))
    touched = {*spec.columns, *spec.columns.values()}
    kept = {name: value for name, value in row.items() if name not in touched}
    return kept | {new: row[old] for new, old in spec.columns.items() if old}


def _on_this_side(row: dict[str, Any], spec: DataSpec) -> bool:
    if spec.part == "all" or not spec.held_out:
        return spec.part != "eval"
    share = int.from_bytes(hashlib.sha256(canonical(row)).digest()[:8], "big") / 2**64
    return (share < spec.held_out) == (spec.part == "eval")


def _check_prompt(row: dict[str, Any], column: str) -> None:
    """Raise TaskError unless the column holds text or a conversation."""
    value = row.get(column)
    if isinstance(value, str) or conversation_of(value) is not None:
        return
    if isinstance(value, list):
        what = f"a list of {type(value[0]).__name__}" if value else "an empty list"
        hint = f"it has {what}; a message has `role` and `content`"
        raise TaskError(f"no messages in `{column}`", hint=hint)
    if value is not None:
        hint = f"it has {type(value).__name__}; task.columns names another one"
        raise TaskError(f"no text in `{column}`", hint=hint)
    other_columns = {name: value for name, value in row.items() if name != column}
    raise TaskError(f"no text in `{column}`", hint=nearest(column, other_columns) or _columns(row))


def _columns(row: dict[str, Any]) -> str:
    return f"it has {', '.join(f'`{name}`' for name in row) or 'no columns'}"


def _key(sources: Sequence[Source], spec: DataSpec) -> str:
    return sha256_hex(canonical([_FORM, spec, [identity(source) for source in sources]]))[:40]


def prepare(spec: DataSpec, path: Path) -> None:
    """Write the file unless it exists. Raises as `open_rows`."""
    what = describe_sources(spec.sources)
    report = _report.get()
    report(f"data: {what} is prepared once per machine in {path.parent}")
    unfinished = path.with_suffix(".unfinished")

    def progress() -> str:
        with contextlib.suppress(OSError):
            return f"data: {what}: {unfinished.stat().st_size >> 20} MiB written"
        return f"data: {what}: no rows yet"

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _repeating(progress), path.with_name("lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the file
            if path.exists():
                return
            with contextlib.ExitStack() as undone, unfinished.open("wb") as file:
                undone.callback(unfinished.unlink)
                sources = sources_of(spec)
                footer = write_rows(chosen(sources, spec), file)
                if _key(sources, spec) != path.stem:
                    raise TaskError(f"{what}: changed during reading")
                undone.pop_all()
            sync(unfinished)
            unfinished.replace(path)
            make_room(path)
    except OSError as error:
        hint = f"{CACHE_VARIABLE} names another folder"
        raise ResourceError(f"{path.parent}: {error.strerror}", hint=hint) from error
    finally:
        if "pyarrow" in sys.modules:  # its allocator keeps the memory of tables
            sys.modules["pyarrow"].default_memory_pool().release_unused()
    report(f"data: {what}: {footer.rows} rows prepared, {path.stat().st_size >> 20} MiB")


@contextlib.contextmanager
def _repeating(text: Callable[[], str]) -> Iterator[None]:
    """Report `text()` every few seconds, from a thread: a library may read for minutes."""
    report, ended = _report.get(), threading.Event()

    def repeat() -> None:
        while not ended.wait(REPORT_S):
            report(text())

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def make_room(newest: Path, bytes_max: int = CACHE_BYTES_MAX) -> None:
    """Delete the least recently used row files, except the newest, until the rest fits. Mapped
    files stay readable."""
    paths = sorted(newest.parent.glob("*.rows"), key=lambda path: path.stat().st_mtime_ns)
    total = sum(path.stat().st_size for path in paths)
    for path in paths:
        if total <= bytes_max or path == newest:
            continue
        total -= path.stat().st_size
        path.unlink()
