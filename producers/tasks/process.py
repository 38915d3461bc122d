"""Process that runs users' code: opens a task and serves calls until its connection ends.

It never imports torch and redirects users' prints to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import io
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

import msgspec

from dora_pipe.core.errors import ConfigError, DoraError, printable
from dora_pipe.core.system.background import Background
from dora_pipe.core.system.console import name_process, say
from dora_pipe.core.system.linux import die_with
from dora_pipe.core.system.own_code import traceback_of
from dora_pipe.producers.data.prepare import reporting
from dora_pipe.producers.tasks.calls import (
    DOWN,
    Hello,
    Refused,
    Setup,
    StillOpening,
    message_line,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.execution import MAIN
from dora_pipe.producers.tasks.registry import open_task
from dora_pipe.producers.tasks.server import TaskServer
from dora_pipe.producers.tasks.tools import TOOL_LIMIT_S

SERVED: Final = "DORA_PIPE_SERVED_TASK"
"""File with the served task; overrides the connection's."""

READ_BYTES: Final = 1 << 18

END_S: Final = 5.0
"""Seconds after which a process whose main thread hangs ends without it."""


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
    faulthandler.enable()
    name_process(*sys.argv[1:])
    inbox, outbox = _private_streams()
    buffer = bytearray()
    setup = _setup(inbox, buffer)
    if setup is None:
        return
    if served := os.environ.pop(SERVED, ""):
        setup = msgspec.json.decode(Path(served).read_bytes(), type=Setup)
    die_with(setup.parent_pid)
    if setup.task.directory:
        sys.path.insert(0, setup.task.directory)
    TOOL_LIMIT_S.set(setup.task.environment_timeout_s)
    write = _writer(outbox)
    opened = _open(setup, write)
    if isinstance(opened, Refused):
        write(pack(opened))
        return
    server, hello = opened
    write(pack(hello))
    MAIN.accept()
    Background().run(_serve(server, inbox, buffer))
    MAIN.serve()


async def _serve(server: TaskServer, inbox: int, buffer: bytearray) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def take() -> None:
        for body in unpack(buffer):
            server.take(DOWN.decode(body))

    def receive() -> None:
        data = _read(inbox)
        buffer.extend(data)
        take()
        if not data:
            loop.remove_reader(inbox)
            ended.set()

    take()
    loop.add_reader(inbox, receive)
    await ended.wait()
    await server.close()
    MAIN.stop()
    await asyncio.sleep(END_S)
    os._exit(1)


def _setup(inbox: int, buffer: bytearray) -> Setup | None:
    while data := _read(inbox):
        buffer += data
        if body := next(unpack(buffer), None):
            return msgspec.json.decode(body, type=Setup)
    return None


def _read(inbox: int) -> bytes:
    with contextlib.suppress(ConnectionError, TimeoutError):
        return os.read(inbox, READ_BYTES)
    return b""


def _open(setup: Setup, write: Callable[[bytes], None]) -> tuple[TaskServer, Hello] | Refused:
    try:
        with reporting(lambda text: _still_opening(text, write)):
            server = TaskServer(open_task(setup.task), setup, write)
        return server, Hello(server.facts())
    except DoraError as error:
        return Refused(error.message, error.hint, isinstance(error, ConfigError))
    except (Exception, SystemExit) as error:
        sys.stderr.write(traceback_of(error))
        message = message_line(f"the task cannot be opened: {type(error).__name__}: {error}")
        return Refused(message, None, False)


def _still_opening(text: str, write: Callable[[bytes], None]) -> None:
    say(text)
    write(pack(StillOpening()))


def _private_streams() -> tuple[int, int]:
    """Separate the protocol from the standard streams."""
    inbox, outbox = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    sys.stdout, sys.stderr = PlainLines.of(sys.stdout), PlainLines.of(sys.stderr)
    return inbox, outbox


def _writer(outbox: int) -> Callable[[bytes], None]:
    """Return a thread-safe writer that ignores a closed connection."""
    writing = threading.Lock()

    def write(data: bytes) -> None:
        view = memoryview(data)
        with writing, contextlib.suppress(ConnectionError, TimeoutError):
            while view:
                view = view[os.write(outbox, view) :]

    return write


if __name__ == "__main__":
    main()
