"""Preparation of rows: small data stays in memory, large data becomes one file per machine.

A file is valid while the specification and each source's size, time and inode are unchanged;
`hf:NAME` keeps its content until the file is deleted. Files are in DORA_PIPE_CACHE (default:
`dora-pipe` in the user's cache folder). A separate process writes them, so that the memory for
reading tables is freed.

    python -m dora_pipe.producers.data.prepare    started by `open_rows`
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.core import errors
from dora_pipe.core.errors import DoraError, ResourceError, TaskError
from dora_pipe.core.system.durable import sync
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.data.conversations import conversation_of
from dora_pipe.producers.data.filters import compile_filter
from dora_pipe.producers.data.readers import Placed, rows_of
from dora_pipe.producers.data.rows import DataRows, TooManyBytes, write_rows
from dora_pipe.producers.data.spec import (
    DataFile,
    DataProgress,
    DataRefused,
    DataSpec,
    Source,
    describe_sources,
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

SILENT_S: Final = 3600.0
"""Seconds without progress after which preparation fails."""

_FORM: Final = 1

_COMMAND: Final = (sys.executable, "-P", "-m", "dora_pipe.producers.data.prepare")

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
    size = sum(source.identity()[1] for source in sources if isinstance(source, DataFile))
    if size <= MEMORY_BYTES_MAX and all(isinstance(source, DataFile) for source in sources):
        buffer = io.BytesIO()
        with contextlib.suppress(TooManyBytes):
            write_rows(chosen(sources, spec), buffer, bytes_max=MEMORY_BYTES_MAX)
            return DataRows(buffer.getvalue())
    path = cache_folder() / f"{_key(sources, spec)}.rows"
    if not path.exists():
        _prepare_apart(spec, path)
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


def chosen(
    sources: Sequence[Source], spec: DataSpec, report: Report = lambda text: None
) -> Iterator[Placed]:
    """Yield the selected rows with file and position."""
    keeps = compile_filter(spec.filter) if spec.filter else None
    said_at, taken = time.monotonic(), 0
    for number, source in enumerate(sources, 1):
        where = str(source.path) if isinstance(source, DataFile) else f"hf:{source.name}"
        for location, given in rows_of(source, spec):
            try:
                row = _renamed(given, spec)
                kept = (keeps is None or keeps(row)) and _on_this_side(row, spec)
                if kept and spec.prompt:
                    _check_prompt(row, spec.prompt)
            except TaskError as error:
                raise TaskError(f"{where}, {location}: {error.message}", hint=error.hint) from error
            if kept:
                taken += 1
                yield f"{where}, {location}", row
            if time.monotonic() - said_at >= REPORT_S:
                said_at = time.monotonic()
                report(f"{taken} rows, in file {number} of {len(sources)}")


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


# Parent side of the preparing process.


def _key(sources: Sequence[Source], spec: DataSpec) -> str:
    return sha256_hex(canonical([_FORM, spec, [source.identity() for source in sources]]))[:40]


def _prepare_apart(spec: DataSpec, path: Path) -> None:
    what = describe_sources(spec.sources)
    say = _report.get()
    say(f"data: {what} is prepared once per machine in {path.parent}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _no_cache(path, error) from error
    order = msgspec.json.encode([spec, str(path)])
    with subprocess.Popen(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        child.stdin.write(order)
        child.stdin.close()
        try:
            refused = _follow(child, lambda text: say(f"data: {what}: {text}"))
        finally:
            child.kill()
    if refused is not None:
        kind = getattr(errors, refused.kind, TaskError)
        raise kind(refused.message, hint=refused.hint)
    if not path.exists():
        raise ResourceError(f"{what}: the process that prepares it ended", hint="see its stderr")


def _follow(child: subprocess.Popen[bytes], say: Report) -> DataRefused | None:
    assert child.stdout is not None
    decoder = msgspec.json.Decoder(DataProgress | DataRefused)
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        heard_at = time.monotonic()
        while True:
            if not selector.select(REPORT_S):
                silent_s = time.monotonic() - heard_at
                if silent_s > SILENT_S:
                    raise ResourceError(f"data: no progress for {SILENT_S:.0f} s")
                say(f"for {silent_s:.0f} s nothing new")
                continue
            line = child.stdout.readline()
            if not line:
                return None
            heard_at = time.monotonic()
            message = decoder.decode(line)
            if isinstance(message, DataRefused):
                return message
            say(message.text)


def _no_cache(path: Path, error: OSError) -> ResourceError:
    return ResourceError(
        f"{path.parent}: {error.strerror}", hint=f"{CACHE_VARIABLE} names another folder"
    )


# Child side of the preparing process.


def main() -> None:
    spec, name = msgspec.json.decode(sys.stdin.buffer.read(), type=tuple[DataSpec, str])
    with os.fdopen(os.dup(1), "wb", buffering=0) as outbox:
        os.dup2(2, 1)  # keep prints of libraries out of the messages

        def tell(message: DataProgress | DataRefused) -> None:
            outbox.write(msgspec.json.encode(message) + b"\n")

        try:
            prepare(spec, Path(name), lambda text: tell(DataProgress(text)))
        except DoraError as error:
            tell(DataRefused(error.message, error.hint, type(error).__name__))


def prepare(spec: DataSpec, path: Path, report: Report) -> None:
    """Write the file unless it exists. Raises as `open_rows`."""
    unfinished = path.with_suffix(".unfinished")
    try:
        with path.with_name("lock").open("ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # others wait for the file
            if path.exists():
                return
            with contextlib.ExitStack() as undone, unfinished.open("wb") as file:
                undone.callback(unfinished.unlink)
                sources = sources_of(spec)
                footer = write_rows(chosen(sources, spec, report), file)
                if _key(sources, spec) != path.stem:
                    raise TaskError(f"{describe_sources(spec.sources)}: changed during reading")
                undone.pop_all()
            sync(unfinished)
            unfinished.replace(path)
            report(f"{footer.rows} rows prepared, {path.stat().st_size >> 20} MiB")
            make_room(path)
    except OSError as error:
        raise _no_cache(path, error) from error


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


if __name__ == "__main__":
    main()
