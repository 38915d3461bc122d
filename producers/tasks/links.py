"""What a task is reached by: the pipes of a process here, or a connection to a server of tasks.

Both use the same frames, so the rules for lost or hung processes exist only once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from typing import Final, Protocol

from dora_pipe.core.console import own_name
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.frames import framed
from dora_pipe.producers.tasks.calls import FRAME_BYTES_MAX
from dora_pipe.producers.tasks.interpreter import TOKEN_VARIABLE, Interpreter

TOKEN_CHARACTERS_MIN: Final = 16

MODULE: Final = "dora_pipe.producers.tasks.process"

KEEPALIVE_S: Final = 10
LOST_MS: Final = 30_000
"""A connection whose other end acknowledges nothing for so long has ended."""


class Link(Protocol):
    """Two file descriptors that do not block, and how what is behind them is ended."""

    url: str
    """Of the server; empty for a process here."""

    @property
    def inbox(self) -> int:
        """To write to."""

    @property
    def outbox(self) -> int:
        """To read from."""

    def hang_up(self) -> None:
        """Write nothing more, so that what is there closes its episodes and goes."""

    def kill(self) -> str:
        """End it, and say how it ended. What it wrote is readable."""

    def close(self) -> None:
        """Let the descriptors go."""


class ProcessLink:
    """A process with a session of its own, so that it can be killed with all it started."""

    url = ""

    def __init__(self, interpreter: Interpreter, name: str) -> None:
        """`name`: of the task, where there are several. Raises OSError where it cannot be
        started."""
        self._process = subprocess.Popen(
            interpreter.command(MODULE, " ".join(f"task {name} of {own_name()}".split())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=interpreter.environment(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.inbox, self.outbox = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.inbox, False)
        os.set_blocking(self.outbox, False)

    def hang_up(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> str:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return how_it_ended(self._process.wait())

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


class SocketLink:
    """A connection, which stands for a process of the server: it ends with it."""

    def __init__(self, url: str, token: bytes) -> None:
        """Begin to connect, and say the token. Raises OSError where no such host is known."""
        self.url = url
        host, port = host_and_port(url)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        watch(self._socket)
        self._socket.connect_ex(address)
        # One descriptor cannot be waited for in two ways.
        self.outbox, self.inbox = self._socket.fileno(), os.dup(self._socket.fileno())
        self.first = framed(token, FRAME_BYTES_MAX)

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> str:
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        return f"the connection to {self.url} ended{f': {os.strerror(error)}' if error else ''}"

    def close(self) -> None:
        os.close(self.inbox)
        self._socket.close()


def open_link(url: str, interpreter: Interpreter, *, token: bytes, task: str) -> Link:
    """To a server, or without an `url` a process here. Raises TaskError."""
    try:
        return SocketLink(url, token) if url else ProcessLink(interpreter, task)
    except OSError as error:
        what = f"{url} cannot be reached" if url else "no task process can be started"
        raise TaskError(f"{what}: {error}") from error


KILLED: Final = "its process was killed by signal 9"
"""From outside, as a rule: by who is short of memory, or by hand. A crash has another signal."""


def how_it_ended(status: int) -> str:
    """``how_it_ended(-9) == KILLED``."""
    if status < 0:
        return f"its process was killed by signal {-status}"
    return f"its process ended with status {status}"


def host_and_port(address: str) -> tuple[str, int]:
    """Of ``tcp://host:port``, or ``host:port``. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def server_token() -> bytes:
    """Return the token of servers of tasks, in `TOKEN_VARIABLE`. Raises ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"a server of tasks needs a token of at least {TOKEN_CHARACTERS_MIN} characters",
            hint=f"openssl rand -hex 32; {TOKEN_VARIABLE} has it",
        )
    return token


def watch(connection: socket.socket) -> None:
    """Have it end when its other end is gone without a word, and send at once what is written."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_USER_TIMEOUT", LOST_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
