"""The worker's port to its endpoint process; a restart loses the sessions."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from typing import Final

from dora_pipe.core.errors import ConfigError, ResourceError
from dora_pipe.core.system.console import own_name
from dora_pipe.core.system.proxies import bypass_proxies
from dora_pipe.producers.sessions.frames import (
    SECRET_BYTES,
    UP,
    Addresses,
    Down,
    EndpointSetup,
    Setup,
    pack,
    unpack,
)
from dora_pipe.producers.tasks.calls import EpisodeLost
from dora_pipe.producers.tasks.links import host_and_port
from dora_pipe.producers.worker.effects import (
    CallAsked,
    CloseSession,
    OpenSession,
    SessionEffect,
    SessionEvent,
)

BACKLOG: Final = 4096
READ_BYTES: Final = 1 << 18
READS_MAX: Final = 64
"""Reads per poll, to bound its time."""

OUT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Unsent bytes of a stuck endpoint."""

DEATHS_MAX: Final = 8
"""Consecutive exits without a call."""

CALLS_OF_ONE: Final = 1 << 40
"""Keeps call numbers of processes unique."""

CLOSE_S: Final = 1.0

_COMMAND = (sys.executable, "-P", "-m", "dora_pipe.producers.sessions.server")
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Agents run on this machine."""


class SessionPort:
    """Port for sessions; emits `CallAsked` and `EpisodeLost`. Raises ConfigError if it cannot
    listen, ResourceError if processes keep exiting.
    """

    def __init__(self, setup: EndpointSetup) -> None:
        self._setup = setup
        self._door = _listening(setup.listen)
        host, port = self._door.getsockname()[:2]
        self.addresses = Addresses(
            host=_ANYWHERE.get(host, host), port=port, secret=os.urandom(SECRET_BYTES)
        )
        self._open: set[str] = set()
        self._events: list[SessionEvent] = []
        self._deaths_in_a_row = 0
        self._started = 0
        self.deaths = 0
        self._closed = False
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, effect: SessionEffect) -> None:
        request = effect.request
        if isinstance(effect, OpenSession):
            self._open.add(request)
        elif isinstance(effect, CloseSession):
            if request not in self._open:
                return
            self._open.remove(request)
            self._events = [event for event in self._events if event.request != request]
        self._put(effect)
        self._flush()

    def poll(self) -> list[SessionEvent]:
        """Return new events. Raises ResourceError."""
        self._flush()
        self._receive()
        events, self._events = self._events, []
        return events

    @property
    def busy(self) -> bool:
        return bool(self._events)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._link.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(CLOSE_S)
        self._process.kill()
        self._process.wait()
        self._door.close()

    def _start(self) -> None:
        self._link, theirs = socket.socketpair()
        command = [*_COMMAND, str(self._door.fileno()), str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, f"endpoint of {own_name()}".strip()],
                stdin=subprocess.DEVNULL,
                pass_fds=(self._door.fileno(), theirs.fileno()),
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        self._link.setblocking(False)
        self._in, self._out = bytearray(), bytearray()
        first_call = self._started * CALLS_OF_ONE
        secret = self.addresses.secret
        self._put(
            Setup(
                parent_pid=os.getpid(), secret=secret, first_call=first_call, endpoint=self._setup
            )
        )
        self._started += 1

    def _put(self, frame: Down) -> None:
        self._out += pack(frame)
        if len(self._out) > OUT_BYTES_MAX:
            raise ResourceError(f"the endpoint has not taken {len(self._out)} bytes for it")

    def _flush(self) -> None:
        while self._out:
            try:
                sent = self._link.send(self._out)
            except BlockingIOError:
                return
            except (BrokenPipeError, ConnectionResetError):
                return  # noticed when reading
            del self._out[:sent]

    def _receive(self) -> None:
        for _ in range(READS_MAX):
            try:
                data = self._link.recv(READ_BYTES)
            except BlockingIOError:
                return
            except ConnectionResetError:
                data = b""
            if not data:
                self._ended()
                return
            self._in += data
            for body in unpack(self._in):
                self._deaths_in_a_row = 0
                asked = UP.decode(body)
                if asked.request in self._open:
                    self._events.append(asked)

    def _ended(self) -> None:
        """Restart at the same address."""
        self._link.close()
        self._process.kill()
        status = self._process.wait()
        self.deaths += 1
        self._deaths_in_a_row += 1
        why = f"the endpoint's process ended with status {status}"
        if self._deaths_in_a_row >= DEATHS_MAX:
            raise ResourceError(
                f"{DEATHS_MAX} consecutive endpoint processes ended without a call; the last"
                f" with status {status}",
                hint="see their stderr",
            )
        lost, self._open = sorted(self._open), set()
        self._events = [event for event in self._events if not isinstance(event, CallAsked)]
        self._events += [EpisodeLost(request=request, message=why) for request in lost]
        self._start()


def _listening(where: str) -> socket.socket:
    host, port = host_and_port(where)
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        door = socket.socket(family, socket.SOCK_STREAM)
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((host, port))
        door.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"workers.endpoint: cannot listen at {host}:{port}: {error.strerror}",
            hint="use port 0 for any free port; two workers cannot share a port",
        ) from None
    return door


def reach_directly(where: str) -> None:
    """Bypass proxies for agents of this process. Raises ConfigError."""
    bypass_proxies(host_of_agents(where))


def host_of_agents(where: str) -> str:
    """Return the numeric address for agents. Raises ConfigError."""
    with _listening(f"{where.rpartition(':')[0]}:0") as door:
        host = str(door.getsockname()[0])
    return _ANYWHERE.get(host, host)
