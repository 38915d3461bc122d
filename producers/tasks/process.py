"""The process that runs users' code: opens a task and serves calls until its pipe ends.

It never imports torch by itself, speaks over private copies of its standard streams (what users
print goes to stderr), and dies with the process that started it.

    python -m dora_pipe.producers.tasks.process      started by `pool.TaskPool`, of no use by hand
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
from contextvars import copy_context
from pathlib import Path
from typing import Final, TextIO

import msgspec

from dora_pipe.core.console import die_with, name_process, say
from dora_pipe.core.errors import ConfigError, DoraError, printable
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
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.server import TaskServer, traceback_of
from dora_pipe.producers.tasks.tape import CASSETTE, nobody_is_asked, open_cassette
from dora_pipe.producers.tasks.tape_client import OF_NO_TRAJECTORY, VARIABLE
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S

SERVED: Final = "DORA_PIPE_SERVED_TASK"
"""Names the file that says which task a process serves, whatever the connection asks for."""

READ_BYTES: Final = 1 << 18
WATCH_S: Final = 0.25
"""How often it is seen whether the main thread hangs."""


class PlainLines(io.TextIOWrapper):
    """A stream for what users print: it may quote what a model sampled, and steers no terminal."""

    @classmethod
    def of(cls, stream: TextIO) -> PlainLines:
        """In place of a standard stream."""
        return cls(
            stream.buffer,
            encoding=stream.encoding,
            errors="backslashreplace",
            line_buffering=True,
        )

    def write(self, text: str) -> int:
        """Text, with every character that a terminal obeys as an escape."""
        super().write("\n".join(map(printable, text.split("\n"))))
        return len(text)


def main() -> None:
    """Serve until the pipe ends; the words behind it are what the process is called."""
    faulthandler.enable()
    name_process(*sys.argv[1:])
    inbox, outbox = _private_pipes()
    frames = _frames(inbox)
    setup = next(frames, None)
    if not isinstance(setup, Setup):
        return
    if served := os.environ.pop(SERVED, ""):
        own = msgspec.json.decode(Path(served).read_bytes(), type=Setup)
        setup = msgspec.structs.replace(own, run=setup.run)
    die_with(setup.parent_pid)
    if setup.task.directory:
        sys.path.insert(0, setup.task.directory)
    TOOL_LIMIT_S.set(setup.task.tool_timeout_s or setup.task.environment_timeout_s)
    opened = _open(setup, _writer(outbox))
    if isinstance(opened, Refused):
        _write(outbox, pack(opened))
        return
    server, hello = opened
    _write(outbox, pack(hello))
    Line(frames, server).serve()
    server.keep()
    server.close()


class Line:
    """Takes one frame after the other, in the main thread; in another one when that is held by a
    call beyond its limit, so that the process can end its other episodes before it goes."""

    def __init__(self, frames: Iterator[Down], server: TaskServer) -> None:
        self._frames, self._server = frames, server
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._context = copy_context()
        self._taker = threading.get_ident()
        self._late_at_s: float | None = None

    def serve(self) -> None:
        """Take frames to the end of the pipe. Raises what is wrong with one."""
        threading.Thread(target=self._watch, daemon=True).start()
        self._take()
        self._over.wait()

    def _take(self) -> None:
        me = self._taker = threading.get_ident()
        try:
            while self._taker == me and (frame := next(self._frames, None)) is not None:
                self._one(frame)
                with self._lock:
                    if self._taker == me:
                        self._late_at_s = None
        finally:
            if self._taker == me:
                self._over.set()

    def _one(self, frame: Down) -> None:
        if isinstance(frame, Call) and frame.limit_s:
            self._late_at_s = time.monotonic() + frame.limit_s
        if not isinstance(frame, Setup):
            self._server.take(frame)

    def _watch(self) -> None:
        while not self._over.wait(WATCH_S):
            with self._lock:
                if self._late_at_s is None or time.monotonic() < self._late_at_s:
                    continue
                self._taker, self._late_at_s = 0, None
            self._server.exhaust("its main thread hangs")
            another = self._context.copy()
            threading.Thread(target=another.run, args=(self._take,), daemon=True).start()


def _open(setup: Setup, write: Callable[[bytes], None]) -> tuple[TaskServer, Hello] | Refused:
    try:
        CASSETTE.set(open_cassette(setup.task, setup.run))
        os.environ[VARIABLE] = OF_NO_TRAJECTORY if nobody_is_asked() else ""
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
    """Move the protocol off the standard streams, where users' code reads and prints."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = PlainLines.of(sys.stdout), PlainLines.of(sys.stderr)
    return inbox, outbox


def _frames(inbox: int) -> Iterator[Down]:
    """To the end of the pipe, or of a connection, which may be lost."""
    buffer = bytearray()
    with contextlib.suppress(ConnectionError, TimeoutError):
        while data := os.read(inbox, READ_BYTES):
            buffer += data
            for body in unpack(buffer):
                yield DOWN.decode(body)


def _writer(outbox: int) -> Callable[[bytes], None]:
    """Writes whole frames, from whichever thread; for nobody, where nobody reads any more: then
    there is nothing more to be read, either."""
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
        sys.exit(1)  # the pool is gone, or is not one
