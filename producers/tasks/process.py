"""Process that runs users' code: opens a task and serves calls until its pipe ends.

It never imports torch and redirects users' prints to stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TextIO

import msgspec

from dora_pipe.core.errors import ConfigError, DoraError, printable
from dora_pipe.core.system.console import name_process, say
from dora_pipe.core.system.linux import die_with
from dora_pipe.core.system.own_code import traceback_of
from dora_pipe.producers.data.prepare import reporting
from dora_pipe.producers.tasks.calls import (
    DOWN,
    Call,
    Down,
    Hello,
    Refused,
    Setup,
    StillOpening,
    one_line,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.main_thread import MAIN, Limit
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.server import TaskServer
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S

SERVED: Final = "DORA_PIPE_SERVED_TASK"
"""File with the served task; overrides the connection's."""

READ_BYTES: Final = 1 << 18
END_S: Final = 5.0


class PlainLines(io.TextIOWrapper):
    """Output stream with control characters escaped."""

    @classmethod
    def of(cls, stream: TextIO) -> PlainLines:
        return cls(
            stream.buffer, encoding=stream.encoding, errors="backslashreplace", line_buffering=True
        )

    def write(self, text: str) -> int:
        super().write("\n".join(map(printable, text.split("\n"))))
        return len(text)


def main() -> None:
    """Serve until the pipe ends; arguments are the process name."""
    faulthandler.enable()
    name_process(*sys.argv[1:])
    inbox, outbox = _private_pipes()
    MAIN.serve(inbox)
    frames = _frames(inbox)
    setup = next(frames, None)
    if not isinstance(setup, Setup):
        return
    if served := os.environ.pop(SERVED, ""):
        setup = msgspec.json.decode(Path(served).read_bytes(), type=Setup)
    die_with(setup.parent_pid)
    if setup.task.directory:
        sys.path.insert(0, setup.task.directory)
    TOOL_LIMIT_S.set(setup.task.environment_timeout_s)
    opened = _open(setup, _writer(outbox))
    if isinstance(opened, Refused):
        _write(outbox, pack(opened))
        return
    server, hello = opened
    _write(outbox, pack(hello))
    threading.Thread(target=_watch, args=(server,), daemon=True).start()
    _serve(frames, server)
    MAIN.stop()
    server.close()


def _watch(server: TaskServer) -> None:
    """End a hanging process, also without a pool."""
    MAIN.watch(server.hangs)
    time.sleep(END_S)
    os._exit(1)


def _serve(frames: Iterator[Down], server: TaskServer) -> None:
    """Raises errors of invalid frames."""
    for frame in frames:
        if isinstance(frame, Call):
            with MAIN.limited(Limit(frame.number), frame.limit_s):
                server.take(frame)
        elif not isinstance(frame, Setup):
            server.take(frame)
        MAIN.run_work()


def _open(setup: Setup, write: Callable[[bytes], None]) -> tuple[TaskServer, Hello] | Refused:
    try:
        with reporting(lambda text: _still_opening(text, write)):
            server = TaskServer(open_task(setup.task), setup, write)
        return server, Hello(server.facts())
    except DoraError as error:
        return Refused(error.message, error.hint, isinstance(error, ConfigError))
    except (Exception, SystemExit) as error:
        sys.stderr.write(traceback_of(error))
        message = one_line(f"the task cannot be opened: {type(error).__name__}: {error}")
        return Refused(message, None, False)


def _still_opening(text: str, write: Callable[[bytes], None]) -> None:
    say(text)
    write(pack(StillOpening()))


def _private_pipes() -> tuple[int, int]:
    """Separate the protocol from the standard streams."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = PlainLines.of(sys.stdout), PlainLines.of(sys.stderr)
    return inbox, outbox


def _frames(inbox: int) -> Iterator[Down]:
    buffer = bytearray()
    with contextlib.suppress(ConnectionError, TimeoutError):
        while data := _read(inbox):
            buffer += data
            for body in unpack(buffer):
                yield DOWN.decode(body)


def _read(inbox: int) -> bytes:
    MAIN.wait()
    return os.read(inbox, READ_BYTES)


def _writer(outbox: int) -> Callable[[bytes], None]:
    """Return a thread-safe writer that ignores a closed pipe."""
    whole = threading.Lock()

    def write(data: bytes) -> None:
        with whole, contextlib.suppress(ConnectionError, TimeoutError):
            _write(outbox, data)

    return write


def _write(outbox: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(outbox, view) :]


if __name__ == "__main__":
    try:
        main()
    except (ConnectionError, TimeoutError, msgspec.DecodeError):
        sys.exit(1)  # the pool is gone or invalid
