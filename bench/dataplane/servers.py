"""The servers of peers, started and ended by the bench; decides which peers can be here.

redis-server is Debian's; TransferQueue and the client of Redis live in `.venv-peers`, which
`make peers` makes.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import dora_pipe
from dora_pipe.bench.dataplane.bounds import MEMORY
from dora_pipe.bench.dataplane.peers import (
    COPY,
    DISK,
    NAMESPACE,
    PEERS,
    QUEUE,
    QUEUE_ONE,
    RAW,
    REDIS,
)
from dora_pipe.bench.processes import end
from dora_pipe.core.errors import ResourceError

START_LIMIT_S: Final = 120.0
"""Ray takes half a minute on two busy cores."""

_HOST: Final = "dora_pipe.bench.dataplane.queue_host"
_MODULES: Final = {REDIS: "redis", QUEUE: "transfer_queue", QUEUE_ONE: "transfer_queue"}

QUIET: Final = {
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Of TransferQueue and Ray: one thread, as everywhere here, nothing sent to anybody, and a token
without which nobody on the network enters the cluster."""


def python_of(kind: str) -> str:
    """The interpreter that has the packages of a peer; empty where none has."""
    module = _MODULES.get(kind)
    if module is None or importlib.util.find_spec(module):
        return sys.executable
    root = Path(next(iter(dora_pipe.__path__)))
    beside = root / ".venv-peers" / "bin" / "python"
    return str(beside) if beside.exists() else ""


def missing(kind: str, kafka: str) -> str:
    """Why a peer cannot be measured here; empty where it can."""
    if kind == RAW:
        return "" if kafka else "no broker (--bus)"
    if kind in (COPY, DISK):
        there = kind == DISK or os.access(MEMORY, os.W_OK)
        return "" if there else f"no file system in memory ({MEMORY})"
    if not python_of(kind):
        return "not installed (make peers)"
    if kind == REDIS and not shutil.which("redis-server"):
        return "no redis-server (apt-get install redis-server)"
    return ""


@contextmanager
def serving(kinds: Sequence[str], kafka: str, folder: Path) -> Iterator[dict[str, str]]:
    """The addresses of peers while their servers run. Raises ResourceError."""
    with ExitStack() as stack:
        found = {one: f"{one}:{folder}" for one in (COPY, DISK) if one in kinds}
        if RAW in kinds:
            found[RAW] = f"{RAW}:{kafka}"
        if REDIS in kinds:
            found[REDIS] = f"{REDIS}:{stack.enter_context(_redis(folder))}"
        queues = [one for one in kinds if one in (QUEUE, QUEUE_ONE)]
        if queues:
            address = stack.enter_context(_queue())
            found |= {one: f"{one}:{address}" for one in queues}
        yield found


@contextmanager
def _redis(folder: Path) -> Iterator[int]:
    """With a file that every write is appended to, synced every second."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    words = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    words += ["--appendonly", "yes", "--appendfsync", "everysec", "--dir", str(folder)]
    words += ["--auto-aof-rewrite-percentage", "0", "--daemonize", "no"]
    with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as server:
        try:
            _until_it_listens(server, port)
            yield port
        finally:
            server.terminate()
            end(server, at_once=False)


def _until_it_listens(server: subprocess.Popen[bytes], port: int) -> None:
    until_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < until_s and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise ResourceError("redis-server does not listen")


@contextmanager
def _queue() -> Iterator[str]:
    """The address of a Ray cluster in which TransferQueue's actors are."""
    environment = {**os.environ, **QUIET}
    with subprocess.Popen(
        [python_of(QUEUE), "-m", _HOST],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    ) as host:
        assert host.stdout is not None
        try:
            said = host.stdout.readline().decode().split()
            if len(said) != 2 or said[0] != NAMESPACE:
                raise ResourceError("TransferQueue does not start", hint="what it said is above")
            yield said[1]
        finally:
            end(host, at_once=False)


def environment_of(kind: str) -> Mapping[str, str]:
    """What a process of this plane has in its environment beside the bench's own."""
    return QUIET if kind in (QUEUE, QUEUE_ONE) else {}


def wanted(kafka: str) -> tuple[list[str], dict[str, str]]:
    """The peers that can be measured here, and why the others cannot."""
    why = {kind: missing(kind, kafka) for kind in PEERS}
    return [kind for kind in PEERS if not why[kind]], {k: each for k, each in why.items() if each}
