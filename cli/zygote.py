"""A process that has imported what roles need and forks them: importing torch costs seconds.

The supervisor forks a zygote before it opens anything. The zygote imports, then forks a role
whenever a line on its pipe asks for one, and reports who ended and how. It has no thread and no
open log, so that its children start clean. When the supervisor goes, the pipe closes and
everything the zygote started is killed: no role outlives its run.
"""

from __future__ import annotations

import ctypes
import importlib
import itertools
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import msgspec

from dora_pipe.errors import ResourceError

PR_SET_PDEATHSIG: Final = 1
READ_BYTES: Final = 65536

CUDA_BY_NVML: Final = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""An import that asks torch for a GPU must not start CUDA: no role could use it after the fork."""


class Spawn(msgspec.Struct, frozen=True, tag="spawn"):
    """Fork a role under this name."""

    name: str


class Started(msgspec.Struct, frozen=True, tag="started"):
    """The role runs under this process id."""

    name: str
    pid: int


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The role ended with an exit code, or negative: by that signal."""

    name: str
    pid: int
    code: int


Report = Started | Ended
_SPAWN = msgspec.json.Decoder(Spawn)
_REPORT = msgspec.json.Decoder(Report)


class Zygote:
    """The supervisor's end. Example: ``Zygote(main, preload=("torch",)).spawn("w0")``."""

    def __init__(self, role: Callable[[str], int], *, preload: Sequence[str] = ()) -> None:
        """Fork now; `role(name)` is what a forked role runs, its result the exit code."""
        request_read, self._request = os.pipe()
        self._reports, report_write = os.pipe()
        self._buffer = b""
        self.pid = os.fork()
        if self.pid == 0:
            close_all_but(request_read, report_write)
            _serve(role, preload, request_read, report_write)
        os.close(request_read)
        os.close(report_write)

    def fileno(self) -> int:
        """Readable when there is a report."""
        return self._reports

    def spawn(self, name: str) -> None:
        """Ask for a role; `Started` comes as a report."""
        try:
            os.write(self._request, msgspec.json.encode(Spawn(name)) + b"\n")
        except BrokenPipeError:
            raise ResourceError("the process that starts roles is gone") from None

    def reports(self, timeout_s: float) -> list[Report]:
        """What happened since the last call; waits at most `timeout_s`."""
        ready, _, _ = select.select([self._reports], [], [], timeout_s)
        if not ready:
            return []
        data = os.read(self._reports, READ_BYTES)
        if not data:
            raise ResourceError(
                "the process that starts roles died", hint="out of memory? see the system's log"
            )
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        return [_REPORT.decode(line) for line in lines]

    def close(self) -> None:
        """Let the zygote kill what is left, and go."""
        for fd in (self._request, self._reports):
            os.close(fd)
        os.waitpid(self.pid, 0)


def close_all_but(*kept: int) -> None:
    """Close what was inherited: another zygote's pipe held open here would never end over there."""
    edges = [2, *sorted(kept), os.sysconf("SC_OPEN_MAX")]
    for low, high in itertools.pairwise(edges):
        os.closerange(low + 1, high)


def _serve(
    role: Callable[[str], int], preload: Sequence[str], requests: int, reports: int
) -> NoReturn:
    """The zygote's life; never returns into the caller's code."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.setdefault(*CUDA_BY_NVML)
        for module in preload:
            importlib.import_module(module)
        _fork_roles(role, requests, reports)
        code = 0
    except (ImportError, OSError) as error:
        sys.stderr.write(f"error: what starts roles ends: {type(error).__name__}: {error}\n")
    finally:
        sys.stderr.flush()
        os._exit(code)


def _fork_roles(role: Callable[[str], int], requests: int, reports: int) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, str] = {}
    buffer = b""
    while True:
        ready, _, _ = select.select([requests, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, READ_BYTES)
        _reap(children, reports)
        if requests not in ready:
            continue
        data = os.read(requests, READ_BYTES)
        if not data:
            break
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            name = _SPAWN.decode(line).name
            pid = _fork_role(role, name, (requests, reports, wake_read, wake_write))
            children[pid] = name
            _tell(reports, Started(name, pid))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _fork_role(role: Callable[[str], int], name: str, fds: Sequence[int]) -> int:
    zygote = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != zygote:
            return 1  # it died before the line above could bind this process to it
        for fd in fds:
            os.close(fd)
        code = role(name)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _reap(children: dict[int, str], reports: int) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        name = children.pop(pid, "")
        _tell(reports, Ended(name, pid, os.waitstatus_to_exitcode(status)))


def _tell(reports: int, report: Report) -> None:
    try:
        os.write(reports, msgspec.json.encode(report) + b"\n")
    except BrokenPipeError:
        return
