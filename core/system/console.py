"""Console output without terminal control sequences, process names, and start of child
processes."""

from __future__ import annotations

import io
import logging
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Final, TextIO

from dora_pipe.core.errors import (
    MESSAGE_CHARACTERS_MAX,
    DoraError,
    ResourceError,
    one_line,
    printable,
)

RUNS_VARIABLE: Final = "DORA_PIPE_RUNS"

RUNS: Final = Path("runs")
"""Default directory of runs."""

LOG_CHARACTERS_MAX: Final = MESSAGE_CHARACTERS_MAX
"""Maximum characters per log line."""


class LogLines(logging.Formatter):
    """Formatter with one line per record, plus internal tracebacks."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, LOG_CHARACTERS_MAX)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(one_line(line, LOG_CHARACTERS_MAX) for line in lines)


def log_to_stderr(level: int, layout: str = "%(message)s") -> None:
    """Log to stderr in this layout."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLines(layout))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def speak() -> None:
    """Escape characters that the output cannot encode."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """Write a line to stderr; errors are ignored (`outlasting`)."""
    text = f"{printable(line)}\n"
    try:
        write_to(sys.stderr, text)
    except OSError as error:
        _redirect_talk(error, text)


_elsewhere: list[Path] = []
"""Replacements of a broken stderr."""


@contextmanager
def outlasting(log: Path) -> Iterator[None]:
    """Survive a closed terminal: stderr continues in `log`."""
    _elsewhere.append(log)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # child processes inherit it
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        _elsewhere.remove(log)


def _redirect_talk(error: OSError, text: str) -> None:
    for path in (*_elsewhere[-1:], Path(os.devnull)):
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, sys.stderr.fileno())
            os.close(file)
            why = f"the console accepts no more lines ({error.strerror}); they continue here\n"
            write_to(sys.stderr, why + text)
            return


def complain(error: DoraError) -> None:
    """Print an error with its hint."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def typed(*words: str | Path, runs: Path = RUNS) -> str:
    """Return a command for a hint, `--runs` included if needed.

    Example: ``typed("run", "a.toml", "--resume", runs=Path("x")) == "dora-pipe run a.toml --resume
    --runs x"``
    """
    line = ["dora-pipe", *map(str, words)]
    if runs != Path(os.environ.get(RUNS_VARIABLE) or RUNS):
        line += ["--runs", str(runs)]
    return shlex.join(line)


_uncover: list[Callable[[], None]] = []
"""Callbacks that erase drawings before a line."""


@contextmanager
def covered(clear: Callable[[], None]) -> Iterator[None]:
    """Register `clear` for a drawing during the block."""
    _uncover.append(clear)
    try:
        yield
    finally:
        _uncover.remove(clear)


def write_to(stream: TextIO, text: str) -> None:
    """Write and flush."""
    for clear in _uncover:
        clear()
    stream.write(text)
    stream.flush()


PREFIX: Final = "dora-pipe "


def name_process(*words: str) -> None:
    """Set the process title: ``name_process("worker", "w0", "demo")`` shows ``dora-pipe worker w0
    demo``."""
    with suppress(ImportError):  # a task's interpreter may lack it
        from setproctitle import setproctitle

        setproctitle(PREFIX + printable(" ".join(words)))


def own_name() -> str:
    """Return the process title without `dora-pipe`."""
    from setproctitle import getproctitle

    title = getproctitle()
    return title.removeprefix(PREFIX) if title.startswith(PREFIX) else ""


def start_module(
    module: str, message: bytes, *, stdout: IO[bytes] | int, stderr: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` in its own session with `message` on stdin. Raises ResourceError.

    An unread message does not block.
    """
    try:
        with _open_message() as stdin:
            stdin.write(message)
            stdin.seek(0)
            return subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                bufsize=0,
                start_new_session=True,
            )
    except OSError as error:
        raise ResourceError(f"cannot start a process: {error.strerror}") from None


def _open_message() -> IO[bytes]:
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("start"), "w+b")  # no disk needed, which may be full
    return TemporaryFile()
