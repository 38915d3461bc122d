"""Task server: every connection with the token gets its own task process."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import select
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.config import model
from dora_pipe.config.load import load_config
from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.core.pure.frames import framed
from dora_pipe.core.system.console import say
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.tasks.calls import FRAME_BYTES_MAX, Setup, StillOpening, pack
from dora_pipe.producers.tasks.links import (
    Interpreter,
    host_and_port,
    kill_process,
    server_token,
    start_process,
    watch,
)
from dora_pipe.producers.tasks.process import SERVED

LOG = logging.getLogger(__name__)

TOKEN_S: Final = 10.0
STRANGERS_MAX: Final = 64
GOES_S: Final = 2.0
TURN_S: Final = 0.1
_ENDS: Final = getattr(select, "POLLRDHUP", select.POLLHUP) | select.POLLHUP | select.POLLERR


class TaskHost:
    """Serves one task at one address, with a thread for each connection."""

    def __init__(
        self, task: model.Task, address: tuple[str, int], *, token: bytes, processes_max: int
    ) -> None:
        """Raises OSError, ConfigError."""
        self._hello = framed(token, FRAME_BYTES_MAX)
        self._processes_max = processes_max
        self._interpreter = Interpreter(task.python)
        self._listening = socket.create_server(address, backlog=STRANGERS_MAX)
        self._listening.settimeout(TURN_S)
        self._folder = tempfile.TemporaryDirectory(prefix="dora-pipe-task-")
        self._served = Path(self._folder.name, "setup")
        self._served.write_bytes(msgspec.json.encode(Setup(task, os.getpid())))
        self._strangers = threading.Semaphore(STRANGERS_MAX)
        self._room = threading.Semaphore(processes_max)
        self._threads: set[threading.Thread] = set()
        self._stopped = threading.Event()

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listening.getsockname()
        return host, port

    def serve(self, stop: Callable[[], bool]) -> None:
        while not stop():
            with contextlib.suppress(TimeoutError):
                connection, _ = self._listening.accept()
                if self._strangers.acquire(blocking=False):
                    self._threads = {thread for thread in self._threads if thread.is_alive()}
                    thread = threading.Thread(target=self._welcome, args=(connection,))
                    self._threads.add(thread)
                    thread.start()
                else:
                    connection.close()

    def __enter__(self) -> TaskHost:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join()
        self._listening.close()
        self._folder.cleanup()
        self._interpreter.close()

    def _welcome(self, connection: socket.socket) -> None:
        with connection:
            try:
                trusted = self._has_token(connection)
            finally:
                self._strangers.release()
            if not trusted:
                LOG.warning("task server: closed a connection with another token")
            elif not self._room.acquire(blocking=False):
                message = "task server: %d processes are the limit; closed a connection"
                LOG.warning(message, self._processes_max)
            else:
                self._play(connection)

    def _has_token(self, connection: socket.socket) -> bool:
        """Read the token; the bytes after it belong to the process."""
        token, end_s = b"", time.monotonic() + TOKEN_S
        connection.settimeout(TURN_S)
        while len(token) < len(self._hello):
            if self._stopped.is_set() or time.monotonic() > end_s:
                return False
            with contextlib.suppress(TimeoutError):
                try:
                    data = connection.recv(len(self._hello) - len(token))
                except ConnectionError:
                    return False
                if not data:
                    return False
                token += data
        return hmac.compare_digest(token, self._hello)

    def _play(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(None)
            watch(connection)
            with contextlib.suppress(OSError):
                connection.sendall(pack(StillOpening()))
            variables = {SERVED: str(self._served)}
            process = start_process(self._interpreter, connection, "task server", variables)
            poll = select.poll()
            poll.register(connection, _ENDS)
            while process.poll() is None and not self._stopped.is_set():
                if poll.poll(TURN_S * 1000):
                    break
        finally:
            self._room.release()
        if not self._stopped.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GOES_S)
        kill_process(process)


def serve_task(
    path: Path, overrides: Sequence[str], *, listen: str, name: str, processes: int
) -> None:
    """Serve a task and print the address. Raises ConfigError, ResourceError."""
    tasks = {task.name: task for task in load_config(path, overrides).tasks}
    if name not in tasks and (name or len(tasks) > 1):
        raise ConfigError(f"unknown task `{name}`", hint=nearest(name, tasks))
    task = tasks[name] if name in tasks else next(iter(tasks.values()))
    if task.url:
        raise ConfigError("task.url: not allowed on a task server", hint="remove it there")
    try:
        address = host_and_port(listen)
    except ValueError:
        raise ConfigError(f"--listen: `{listen}` is not HOST:PORT") from None
    stopped: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda number, _: stopped.append(number))
    token = server_token()
    try:
        host = TaskHost(task, address, token=token, processes_max=processes)
    except OSError as error:
        raise ResourceError(f"cannot listen at {listen}: {error}") from error
    with host:
        say(f"serving `{task.kind}` at tcp://{host.address[0]}:{host.address[1]}")
        host.serve(stop=lambda: bool(stopped))
