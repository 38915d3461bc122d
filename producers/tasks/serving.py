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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from dora_pipe.producers.tasks.interpreter import Interpreter
from dora_pipe.producers.tasks.links import MODULE, host_and_port, server_token, watch
from dora_pipe.producers.tasks.process import SERVED

LOG = logging.getLogger(__name__)

TOKEN_S: Final = 10.0
STRANGERS_MAX: Final = 64
GOES_S: Final = 2.0
TURN_S: Final = 0.1
_ENDS: Final = getattr(select, "POLLRDHUP", select.POLLHUP) | select.POLLHUP | select.POLLERR


@dataclass(slots=True, kw_only=True)
class _Guest:
    connection: socket.socket
    since_s: float
    said: bytes = b""
    process: subprocess.Popen[bytes] | None = None
    ended_s: float | None = None


class TaskHost:
    """Serves one task at one address.

    Example::

        with TaskHost(config.task, ("0.0.0.0", 7000), token=b"...", processes_max=8) as host:
            host.serve(stop=lambda: False)
    """

    def __init__(
        self, task: model.Task, address: tuple[str, int], *, token: bytes, processes_max: int
    ) -> None:
        """Raises OSError, ConfigError."""
        self._token, self._processes_max = token, processes_max
        self._interpreter = Interpreter(task.python)
        self._listening = socket.create_server(address, backlog=STRANGERS_MAX)
        self._listening.setblocking(False)
        self._folder = tempfile.TemporaryDirectory(prefix="dora-pipe-task-")
        self._served = Path(self._folder.name, "setup")
        self._served.write_bytes(msgspec.json.encode(Setup(task, os.getpid())))
        self._guests: list[_Guest] = []

    @property
    def address(self) -> tuple[str, int]:
        host, port, *_ = self._listening.getsockname()
        return host, port

    def serve(self, stop: Callable[[], bool]) -> None:
        while not stop():
            self._wait()
            self._accept()
            for guest in list(self._guests):
                self._look_after(guest)

    def __enter__(self) -> TaskHost:
        return self

    def __exit__(self, *_: object) -> None:
        for guest in list(self._guests):
            self._dismiss(guest)
        self._listening.close()
        self._folder.cleanup()
        self._interpreter.close()

    def _wait(self) -> None:
        poll = select.poll()
        poll.register(self._listening, select.POLLIN)
        for guest in self._guests:
            if guest.ended_s is None:
                served = guest.process is not None
                poll.register(guest.connection, _ENDS if served else _ENDS | select.POLLIN)
        for descriptor, what in poll.poll(TURN_S * 1000):
            for guest in self._guests:
                if guest.connection.fileno() == descriptor and what & _ENDS:
                    guest.ended_s = guest.ended_s or time.monotonic()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listening.accept()
                strangers = sum(guest.process is None for guest in self._guests)
                present = sum(guest.ended_s is None for guest in self._guests)
                if strangers >= STRANGERS_MAX or present >= 2 * self._processes_max:
                    connection.close()
                    continue
                connection.setblocking(False)
                watch(connection)
                self._guests.append(_Guest(connection=connection, since_s=time.monotonic()))

    def _look_after(self, guest: _Guest) -> None:
        now_s = time.monotonic()
        if guest.process is not None:
            over = guest.ended_s is not None and now_s > guest.ended_s + GOES_S
            if over or guest.process.poll() is not None:
                self._dismiss(guest)
        elif guest.ended_s is not None or now_s > guest.since_s + TOKEN_S:
            self._dismiss(guest)
        else:
            self._listen_to(guest)

    def _listen_to(self, guest: _Guest) -> None:
        """The bytes after the token belong to its process."""
        wanted = framed(self._token, FRAME_BYTES_MAX)
        try:
            guest.said += guest.connection.recv(len(wanted) - len(guest.said))
        except BlockingIOError:
            return
        except OSError:
            self._dismiss(guest)
            return
        if not hmac.compare_digest(guest.said, wanted[: len(guest.said)]):
            LOG.warning("task server: closed a connection with another token")
            self._dismiss(guest)
        elif len(guest.said) == len(wanted):
            self._welcome(guest)

    def _welcome(self, guest: _Guest) -> None:
        present = [one for one in self._guests if one.process is not None and one.ended_s is None]
        if len(present) >= self._processes_max:
            LOG.warning(
                "task server: %d processes are the limit; closed a connection",
                self._processes_max,
            )
            self._dismiss(guest)
            return
        guest.connection.setblocking(True)
        with contextlib.suppress(OSError):
            guest.connection.sendall(pack(StillOpening()))
        guest.process = subprocess.Popen(
            self._interpreter.command(MODULE, "task server"),
            stdin=guest.connection.fileno(),
            stdout=guest.connection.fileno(),
            env={**self._interpreter.environment(), SERVED: str(self._served)},
            start_new_session=True,
        )

    def _dismiss(self, guest: _Guest) -> None:
        self._guests.remove(guest)
        if guest.process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(guest.process.pid, signal.SIGKILL)
            guest.process.wait()
        guest.connection.close()


def serve_task(
    path: Path, overrides: Sequence[str], *, listen: str, name: str, processes: int
) -> None:
    """Serve a task and print the address. Raises ConfigError, ResourceError."""
    tasks = {one.name: one for one in load_config(path, overrides).tasks}
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
    for one in (signal.SIGINT, signal.SIGTERM):
        signal.signal(one, lambda number, _: stopped.append(number))
    token = server_token()
    try:
        host = TaskHost(task, address, token=token, processes_max=processes)
    except OSError as error:
        raise ResourceError(f"cannot listen at {listen}: {error}") from error
    with host:
        say(f"serving `{task.kind}` at tcp://{host.address[0]}:{host.address[1]}")
        host.serve(stop=lambda: bool(stopped))
