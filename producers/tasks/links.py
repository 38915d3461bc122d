"""Task processes: their interpreter, their start, and sockets to them, here or on a server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.pure.frames import framed
from dora_pipe.core.system.console import own_name
from dora_pipe.producers.tasks.calls import FRAME_BYTES_MAX, message_line

TOKEN_CHARACTERS_MIN: Final = 16

KEEPALIVE_S: Final = 10
LOST_MS: Final = 30_000
"""Time without acknowledgement that ends a connection."""

KILLED: Final = "its process was killed by signal 9"
"""Usually for lack of memory; a crash has another signal."""


ROOT: Final = Path(__file__).resolve().parents[2]

TOKEN_VARIABLE: Final = "DORA_PIPE_TASK_TOKEN"
"""Hidden from users' code."""

OLDEST: Final = (3, 11)

_QUESTION: Final = "import sys; print('%d.%d' % sys.version_info[:2]); import msgspec"
_ANSWER_S: Final = 60.0
_FIXED: Final = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
"""Rewards must not depend on threads or set order."""


class Interpreter:
    """Runs modules of this package for a task."""

    def __init__(self, python: str) -> None:
        """`python`: path; empty: the current interpreter. Raises ConfigError."""
        self._python = python or sys.executable
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        if python:
            _check(python)
            # Exposes this package, not those installed next to it.
            self._folder = tempfile.TemporaryDirectory(prefix="dora-pipe-")
            Path(self._folder.name, "dora_pipe").symlink_to(ROOT, target_is_directory=True)

    def command(self, module: str, *words: str) -> Sequence[str]:
        return [self._python, "-P", "-m", module, *words]

    def environment(self) -> Mapping[str, str]:
        variables = {**os.environ, **_FIXED}
        variables.pop(TOKEN_VARIABLE, None)
        if self._folder is not None:
            paths = [self._folder.name, variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
            variables.pop("PYTHONHOME", None)
        return variables

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()


def _check(python: str) -> None:
    """Raises ConfigError."""
    words = [python, "-c", _QUESTION]
    key = f"task.python: `{python}`"
    try:
        answer = subprocess.run(
            words, capture_output=True, timeout=_ANSWER_S, check=False, text=True
        )
    except FileNotFoundError:
        raise ConfigError(f"{key} does not exist") from None
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{key} cannot be run: {error}") from error
    version = answer.stdout.strip()
    if not version.replace(".", "").isdecimal():
        raise ConfigError(f"{key} is not Python: {message_line(answer.stderr.strip() or version)}")
    if tuple(map(int, version.split("."))) < OLDEST:
        needed = ".".join(map(str, OLDEST))
        raise ConfigError(f"{key} is Python {version}, expected {needed} or newer")
    if answer.returncode:
        raise ConfigError(
            f"{key} has no msgspec: {message_line(answer.stderr.strip().rpartition(chr(10))[2])}",
            hint=f"{python} -m pip install msgspec",
        )


class Link:
    """Non-blocking socket of a task process."""

    def __init__(self, url: str, interpreter: Interpreter, *, token: bytes, task: str) -> None:
        """Connect to the server at `url`, or start a process. Raises TaskError."""
        self.url = url
        self.process: subprocess.Popen[bytes] | None = None
        self.first = framed(token, FRAME_BYTES_MAX) if url else b""
        """Bytes to send before any frame."""
        try:
            if url:
                self.socket = _connected(url)
            else:
                self.socket, theirs = socket.socketpair()
                with theirs:
                    name = " ".join(f"task {task} of {own_name()}".split())
                    self.process = start_process(interpreter, theirs, name, {})
        except OSError as error:
            what = f"{url} cannot be reached" if url else "no task process started"
            raise TaskError(f"{what}: {error}") from error
        self.socket.setblocking(False)

    def hang_up(self) -> None:
        """Send no more; the process closes its episodes and exits."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def kill(self) -> str:
        """End the process and return how it ended; its output stays readable."""
        if self.process is not None:
            return _how_it_ended(kill_process(self.process))
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        return f"the connection to {self.url} ended{f': {os.strerror(error)}' if error else ''}"


def start_process(
    interpreter: Interpreter, connection: socket.socket, name: str, variables: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Start a process that serves a task over a socket, in a session of its own. Raises OSError."""
    return subprocess.Popen(
        interpreter.command("dora_pipe.producers.tasks.process", name),
        stdin=connection.fileno(),
        stdout=connection.fileno(),
        env={**interpreter.environment(), **variables},
        start_new_session=True,
    )


def kill_process(process: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"its process was killed by signal {-status}"
    return f"its process ended with status {status}"


def _connected(url: str) -> socket.socket:
    host, port = host_and_port(url)
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    connection = socket.socket(family, kind, protocol)
    connection.setblocking(False)
    watch(connection)
    connection.connect_ex(address)
    return connection


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
