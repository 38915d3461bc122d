"""Processes of this package: what they write on stderr (lines, errors with a hint, logs), their
names, their start and their parents.

Nothing of it can steer a terminal: what a model sampled, a task said or a file holds may be an
escape sequence, and is written as text.
"""

from __future__ import annotations

import ctypes
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
"""Where runs lie, seen from where the command is started, unless told otherwise."""

LOG_CHARACTERS_MAX: Final = MESSAGE_CHARACTERS_MAX
"""Of a line in a log: it may quote what a reward, a model or a server said, of any length."""


class LogLines(logging.Formatter):
    """Records as lines of a log: one line each, but for the traceback of a fault of our own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, LOG_CHARACTERS_MAX)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        lines = super().formatException(ei).split("\n")
        return "\n".join(one_line(line, LOG_CHARACTERS_MAX) for line in lines)


def log_to_stderr(level: int, layout: str = "%(message)s") -> None:
    """What modules log goes to stderr, in lines of this layout (`logging`'s % style)."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LogLines(layout))
    logging.basicConfig(level=level, handlers=[handler], force=True)


def speak() -> None:
    """Let every text be written, whatever the terminal or pipe is said to take: what its encoding
    has no bytes for is written as an escape."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(line: str) -> None:
    """One line of talk, to stderr; a stderr that takes no more ends nothing (`outlasting`)."""
    text = f"{printable(line)}\n"
    try:
        write_to(sys.stderr, text)
    except OSError as error:
        _redirect_talk(error, text)


_elsewhere: list[Path] = []
"""Files in which talk continues when stderr takes no more."""


@contextmanager
def outlasting(log: Path) -> Iterator[None]:
    """While the block lasts, outlast the console: a terminal that closes ends nothing, and talk
    that stderr does not take goes into `log`, the reason first."""
    _elsewhere.append(log)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # processes started here inherit it
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
        _elsewhere.remove(log)


def _redirect_talk(error: OSError, text: str) -> None:
    """Move stderr to the file that `outlasting` names, or to nowhere."""
    for path in (*_elsewhere[-1:], Path(os.devnull)):
        with suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(file, sys.stderr.fileno())
            os.close(file)
            why = f"the console takes no more lines ({error.strerror}); they continue here\n"
            write_to(sys.stderr, why + text)
            return


def complain(error: DoraError) -> None:
    """An error as people read it."""
    say(f"error: {error.message}")
    if error.hint:
        say(f"hint: {error.hint}")


def typed(*words: str | Path, runs: Path = RUNS) -> str:
    """A command as a hint prints it: it works where this one was started, `--runs` included.

    Example: ``typed("run", "a.toml", "--resume", runs=Path("x")) ==
    "dora-pipe run a.toml --resume --runs x"``
    """
    line = ["dora-pipe", *map(str, words)]
    if runs != Path(os.environ.get(RUNS_VARIABLE) or RUNS):
        line += ["--runs", str(runs)]
    return shlex.join(line)


_uncover: list[Callable[[], None]] = []
"""Clears what is drawn on the terminal and is no line, before a line is written."""


@contextmanager
def covered(clear: Callable[[], None]) -> Iterator[None]:
    """While the block lasts, something is drawn that `clear` takes away."""
    _uncover.append(clear)
    try:
        yield
    finally:
        _uncover.remove(clear)


def write_to(stream: TextIO, text: str) -> None:
    """Who follows a pipe sees each line when it is said."""
    for clear in _uncover:
        clear()
    stream.write(text)
    stream.flush()


PREFIX: Final = "dora-pipe "


def name_process(*words: str) -> None:
    """Call this process so. Example: ``name_process("worker", "w0", "demo")`` shows
    ``dora-pipe worker w0 demo``."""
    with suppress(ImportError):  # a task's interpreter may lack it
        from setproctitle import setproctitle

        setproctitle(PREFIX + printable(" ".join(words)))


def own_name() -> str:
    """What this process was called without `dora-pipe`; empty where it has no name of its own."""
    from setproctitle import getproctitle

    title = getproctitle()
    return title.removeprefix(PREFIX) if title.startswith(PREFIX) else ""


_LIBC: Final = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Opened before any fork."""

PR_SET_PDEATHSIG: Final = 1
"""Of Linux' prctl: the signal that a process gets when its parent dies."""


def die_with(parent_pid: int) -> None:
    """Be killed when the parent dies, whatever this process does then (Linux; elsewhere it has to
    see that a pipe of the parent's ends)."""
    if _LIBC is not None:
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)  # it died before we asked


def start_module(
    module: str, message: bytes, *, stdout: IO[bytes] | int, stderr: IO[bytes] | None = None
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE` in a session of its own. Raises ResourceError.

    The message is in memory: a process that does not read it blocks no caller.
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
        return os.fdopen(os.memfd_create("start"), "w+b")  # a full disk starts roles, too
    return TemporaryFile()
