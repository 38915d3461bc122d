"""Processes that have imported what others need and fork those: importing torch costs seconds.

The supervisor forks a `ForkServer` before it opens anything. That imports, then forks a role
whenever a line on its pipe asks for one, and reports who ended and how. It has no thread and no
open log, so that its children start clean. When the supervisor goes, the pipe closes and
everything the fork server started is killed: no role outlives its run.

`ForkedHelpers` does the same for a command that wants help: what it forks writes into a pipe, and
ends with that, or with who asked.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NoReturn, Self

import msgspec

from dora_pipe.core.console import name_process, own_name
from dora_pipe.core.errors import ResourceError, reason

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


class ForkServer:
    """The supervisor's end. Example: ``ForkServer(main, preload=("torch",)).spawn("w0")``."""

    def __init__(self, role: Callable[[str], int], *, preload: Sequence[str] = ()) -> None:
        """Fork now; `role(name)` is what a forked role runs, its result the exit code."""
        request_read, self._request = os.pipe()
        self._reports, report_write = os.pipe()
        self._buffer = b""
        self.pid = os.fork()
        if self.pid == 0:
            release_inherited_files(request_read, report_write)
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
        """Let the fork server kill what is left, and go."""
        for fd in (self._request, self._reports):
            os.close(fd)
        os.waitpid(self.pid, 0)


def release_inherited_files(*kept: int) -> None:
    """Let go of what was inherited: another fork server's pipe held here would never end there.

    Each file becomes the empty one and stays open: a library that closes its own in every child
    (Arrow's pipe for signals) ends the child where that is gone.
    """
    with Path(os.devnull).open("rb") as empty:
        for one in list(Path("/dev/fd").iterdir()):
            if (fd := int(one.name)) > 2 and fd not in (*kept, empty.fileno()):
                with suppress(OSError):  # the listing's own
                    os.fstat(fd)
                    os.dup2(empty.fileno(), fd, inheritable=False)


def _serve(
    role: Callable[[str], int], preload: Sequence[str], requests: int, reports: int
) -> NoReturn:
    """The fork server's life; never returns into the caller's code."""
    code = 1
    try:
        os.setsid()
        name_process("fork server of", own_name() or "roles")
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.setdefault(*CUDA_BY_NVML)
        for module in preload:
            importlib.import_module(module)
        _fork_roles(role, requests, reports)
        code = 0
    except (ImportError, OSError) as error:
        sys.stderr.write(f"error: what starts roles ends: {reason(error)}\n")
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
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != fork_server:
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


WORDS_BYTES_MAX: Final = 1 << 17
"""Of what a helper is asked for: a message that is taken whole or not at all."""

OUT_BYTES: Final = 1 << 20

Work = Callable[[bytes, IO[bytes]], None]
"""What a helper does: the words that it is asked with, and where it writes."""


class ForkedHelpers:
    """The end of who asks. Make it before anything is open.

    Example: ``with ForkedHelpers(work) as forks: fd = forks.start(b"...")``.
    """

    def __init__(self, work: Work) -> None:
        self._asking, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _live(work, asked)
        asked.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, words: bytes) -> int:
        """Fork a helper; gives the end of its pipe to read from. Raises ResourceError."""
        assert len(words) <= WORDS_BYTES_MAX
        read, write = os.pipe()
        try:
            socket.send_fds(self._asking, [words], [write])
        except OSError as error:
            os.close(read)
            raise ResourceError(f"no helper can be started: {error.strerror}") from None
        finally:
            os.close(write)
        return read

    def close(self) -> None:
        """End every helper; idempotent."""
        if self._asking.fileno() >= 0:
            self._asking.close()
            os.waitpid(self.pid, 0)


def _live(work: Work, asked: socket.socket) -> NoReturn:
    """Never returns into the caller's code."""
    code = 1
    try:
        release_inherited_files(asked.fileno())
        name_process("fork server of helpers")
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Who asked says what an interrupt means.
        gc.freeze()
        _fork_helpers(work, asked)
        code = 0
    except OSError as error:
        sys.stderr.write(f"error: what starts helpers ends: {reason(error)}\n")
    finally:
        _leave(code)


def _fork_helpers(work: Work, asked: socket.socket) -> None:
    helpers: set[int] = set()
    while True:
        words, fds, _, _ = socket.recv_fds(asked, WORDS_BYTES_MAX, 1)
        if not words:
            break
        pid = os.fork()
        if pid == 0:
            asked.close()
            _help(work, words, fds[0])
        os.close(fds[0])
        helpers = {one for one in helpers if os.waitpid(one, os.WNOHANG)[0] == 0} | {pid}
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    for pid in helpers:
        os.waitpid(pid, 0)


def _help(work: Work, words: bytes, fd: int) -> NoReturn:
    code = 1
    try:
        name_process("helper")
        with os.fdopen(fd, "wb", buffering=OUT_BYTES) as out:
            work(words, out)
        code = 0
    except BrokenPipeError:
        code = 0  # Nobody wants the rest.
    except Exception:
        traceback.print_exc()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(code)
