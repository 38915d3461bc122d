"""Links to a task: pipes of a local process, or a connection to a server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from typing import Final, Protocol

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.pure.frames import framed
from dora_pipe.core.system.console import own_name
from dora_pipe.producers.tasks.calls import FRAME_BYTES_MAX
from dora_pipe.producers.tasks.interpreter import TOKEN_VARIABLE, Interpreter

TOKEN_CHARACTERS_MIN: Final = 16

MODULE: Final = "dora_pipe.producers.tasks.process"

KEEPALIVE_S: Final = 10
LOST_MS: Final = 30_000
"""Time without acknowledgement that ends a connection."""


class Link(Protocol):
    """Two non-blocking file descriptors of a task."""

    url: str

    @property
    def inbox(self) -> int:
        """Descriptor to write to."""

    @property
    def outbox(self) -> int:
        """Descriptor to read from."""

    def hang_up(self) -> None:
        """Close the input; the process closes its episodes and exits."""

    def kill(self) -> str:
        """End the process and return how it ended."""

    def close(self) -> None:
        """Close the descriptors."""


class ProcessLink:
    """Process with its own session, so that its children are killed too."""

    url = ""

    def __init__(self, interpreter: Interpreter, name: str) -> None:
        """Raises OSError."""
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
    """Connection to a server process."""

    def __init__(self, url: str, token: bytes) -> None:
        """Raises OSError for an unknown host."""
        self.url = url
        host, port = host_and_port(url)
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        self._socket.setblocking(False)
        watch(self._socket)
        self._socket.connect_ex(address)
        # A selector can register a descriptor only once.
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
    """Connect to a server, or start a process. Raises TaskError."""
    try:
        return SocketLink(url, token) if url else ProcessLink(interpreter, task)
    except OSError as error:
        what = f"{url} cannot be reached" if url else "no task process started"
        raise TaskError(f"{what}: {error}") from error


KILLED: Final = "its process was killed by signal 9"
"""Usually for lack of memory; a crash has another signal."""


def how_it_ended(status: int) -> str:
    """Describe an exit status."""
    if status < 0:
        return f"its process was killed by signal {-status}"
    return f"its process ended with status {status}"


def host_and_port(address: str) -> tuple[str, int]:
    """Parse ``tcp://host:port`` or ``host:port``. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)


def server_token() -> bytes:
    """Return the token in `TOKEN_VARIABLE`. Raises ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE, "").encode()
    if len(token) < TOKEN_CHARACTERS_MIN:
        raise ConfigError(
            f"a server of tasks needs a token of at least {TOKEN_CHARACTERS_MIN} characters",
            hint=f"openssl rand -hex 32; {TOKEN_VARIABLE} has it",
        )
    return token


def watch(connection: socket.socket) -> None:
    """Detect a lost peer and send without delay."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_S),
        ("TCP_USER_TIMEOUT", LOST_MS),
    ):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
