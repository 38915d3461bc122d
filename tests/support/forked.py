"""Commands of `dora-pipe` forked from a process that has already imported torch and the roles.

Each command is a process with its own directory, environment and signals. Tests of startup (wheel,
compose file, documentation) run the real program. A message on the server's stdin (a socket)
carries the words and three files: stdout, stderr, and a pipe for process id and exit code.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from tests.support.device import ON_GPU
from tests.support.tidy import ROOT

PROGRAM: Final = Path(sys.executable).parent / "dora-pipe"

MESSAGE_BYTES_MAX: Final = 1 << 17
"""Byte limit of a message."""

FILES: Final = 3
"""Files per message."""

PATIENT_S: Final = 120.0
"""How long commands try to reach a broker. The product's 10 s are too few on a busy machine."""

_NUMBER: Final = struct.Struct("=i")

ALSO: Final = (
    "dora_pipe.producers.engines.torch.engine",
    "dora_pipe.producers.engines.vllm.server",
    "dora_pipe.producers.worker.role",
    "dora_pipe.cli.app",
    "dora_pipe.cli.replay",
    "dora_pipe.launch.run",
    "dora_pipe.orchestrator.process.role",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Modules to import besides the trainer's."""


class Forked(subprocess.Popen[bytes]):
    def __init__(self, words: Sequence[str], status: int) -> None:
        self.args = words
        self.stdin = self.stdout = self.stderr = None
        self.returncode = None
        self._status = status
        self._forget = weakref.finalize(self, os.close, status)
        self.pid = self._exit_status()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = self._exit_status()
            self._forget()
        return self.returncode

    def _exit_status(self) -> int:
        data = os.read(self._status, _NUMBER.size)
        assert len(data) == _NUMBER.size, "the process that forks commands is gone"
        number: int = _NUMBER.unpack(data)[0]
        return number


def may_fork() -> bool:
    """Not with a GPU: its libraries must be imported by the process that uses them."""
    return sys.platform == "linux" and not ON_GPU


def fork(
    words: Sequence[str], path: Path, environment: dict[str, str], out: int, err: int
) -> Forked:
    asked = {"words": list(words), "place": str(path), "environment": environment}
    read, write = os.pipe()
    try:
        socket.send_fds(_server(), [json.dumps(asked).encode()], [out, err, write])
    finally:
        os.close(write)
    return Forked([str(PROGRAM), *words], read)


@cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-c", "from tests.support.forked import serve; serve()"],
        cwd=ROOT,
        stdin=theirs.fileno(),
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def serve() -> None:
    from dora_pipe.bus.kafka import client
    from dora_pipe.launch.roles import TRAINER_PRELOAD

    client.CONNECT_LIMIT_S = PATIENT_S
    sys.path[0] = str(PROGRAM.parent)
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # imports must not start CUDA
    for module in (*TRAINER_PRELOAD, *ALSO):
        importlib.import_module(module)
    gc.freeze()
    asked = socket.socket(fileno=0)
    running: dict[int, tuple[int, int]] = {}
    while True:
        ready, _, _ = select.select([0, *running], [], [])
        for entry in set(ready) & running.keys():
            _tell_end(entry, *running.pop(entry))
        if 0 not in ready:
            continue
        message, (*files,), _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, FILES)
        if not message:
            break
        if (pid := os.fork()) == 0:
            asked.detach()
            signal.signal(signal.SIGINT, interrupted)
            _be(
                message,
                files,
                [entry for pair in running.items() for entry in (pair[0], pair[1][1])],
            )
            return
        *written, status = files
        for entry in written:
            os.close(entry)
        _tell(status, pid)
        running[os.pidfd_open(pid)] = (pid, status)
    for pid, _ in running.values():
        os.kill(pid, signal.SIGKILL)


def _tell(status: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the reader may be gone
        os.write(status, _NUMBER.pack(number))


def _tell_end(entry: int, pid: int, status: int) -> None:
    _, how = os.waitpid(pid, 0)
    _tell(status, os.waitstatus_to_exitcode(how))
    os.close(status)
    os.close(entry)


def _be(message: bytes, files: Sequence[int], inherited: Sequence[int]) -> None:
    from dora_pipe.cli.main import main

    asked = json.loads(message)
    out, err, _ = files
    with Path(os.devnull).open("rb") as empty:
        os.dup2(empty.fileno(), 0)
    os.dup2(out, 1)
    os.dup2(err, 2)
    for entry in (*inherited, *files):
        os.close(entry)
    os.environ.clear()
    os.environ.update(asked["environment"])
    os.chdir(asked["place"])
    sys.argv = [str(PROGRAM), *asked["words"]]
    main()
