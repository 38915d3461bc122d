"""Processes that have imported what others need and fork those: importing torch costs seconds.

The supervisor forks a `ForkServer` before it opens anything. That imports, then forks a role
whenever a message asks for one, and reports who ended and how. It has no thread and no open log,
so that its children start clean. When the supervisor goes, the socket closes and everything the
fork server started is killed: no role outlives its run.

`ForkedHelpers` does the same for a command that wants help: what it forks writes into a pipe, and
ends with that, or with who asked.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Final, NoReturn, Self

import msgspec

from dora_pipe.core.console import name_process, own_name
from dora_pipe.core.errors import ResourceError, reason

LOG = logging.getLogger(__name__)

PR_SET_PDEATHSIG: Final = 1

MESSAGE_BYTES_MAX: Final = 1 << 17
"""Of what is asked for: it is taken whole or not at all."""

OUT_BYTES: Final = 1 << 20
"""Of a helper, before they are written into its pipe."""

CUDA_BY_NVML: Final = ("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
"""An import that asks torch for a GPU must not start CUDA: no role could use it after the fork."""


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
_REPORT = msgspec.json.Decoder(Report)

Child = Callable[[bytes, list[int]], int]
"""What a forked process does with a message and the files in it; gives its exit code."""

Work = Callable[[bytes, IO[bytes]], None]
"""What a helper does: the words that it is asked with, and where it writes."""


class _Asking:
    """The end of who asks: forks the fork server now."""

    def __init__(
        self, child: Child, *, name: str, preload: Sequence[str] = (), reporting: bool = False
    ) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _serve(theirs, child, name, preload, reporting)
        theirs.close()

    def close(self) -> None:
        """Let the fork server kill what is left, and go; idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.waitpid(self.pid, 0)


class ForkServer(_Asking):
    """The supervisor's end. Example: ``ForkServer(main, preload=("torch",)).spawn("w0")``."""

    def __init__(self, role: Callable[[str], int], *, preload: Sequence[str] = ()) -> None:
        """`role(name)` is what a forked role runs, its result the exit code."""
        name = own_name() or "roles"
        super().__init__(
            lambda words, _: role(words.decode()), name=name, preload=preload, reporting=True
        )

    def spawn(self, name: str) -> None:
        """Ask for a role; `Started` comes as a report."""
        try:
            self._socket.send(name.encode())
        except ConnectionError:
            raise ResourceError("the process that starts roles is gone") from None

    def reports(self, timeout_s: float) -> list[Report]:
        """What happened since the last call; waits at most `timeout_s`."""
        found: list[Report] = []
        while select.select([self._socket], [], [], 0.0 if found else timeout_s)[0]:
            try:
                data = self._socket.recv(MESSAGE_BYTES_MAX)
            except ConnectionResetError:  # It died before it had read everything.
                continue
            if data:
                found.append(_REPORT.decode(data))
            elif found:
                break
            else:
                raise ResourceError(
                    "the process that starts roles died", hint="out of memory? see the system's log"
                )
        return found


class ForkedHelpers(_Asking):
    """The end of who asks for help. Make it before anything is open.

    Example: ``with ForkedHelpers(work) as forks: fd = forks.start(b"...")``.
    """

    def __init__(self, work: Work) -> None:
        def child(words: bytes, files: list[int]) -> int:
            name_process("helper")
            # A broken pipe: nobody wants the rest.
            with suppress(BrokenPipeError), os.fdopen(files[0], "wb", buffering=OUT_BYTES) as out:
                work(words, out)
            return 0

        super().__init__(child, name="helpers")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, words: bytes) -> int:
        """Fork a helper; gives the end of its pipe to read from. Raises ResourceError."""
        assert len(words) <= MESSAGE_BYTES_MAX
        read, write = os.pipe()
        try:
            socket.send_fds(self._socket, [words], [write])
        except OSError as error:
            os.close(read)
            raise ResourceError(f"no helper can be started: {error.strerror}") from None
        finally:
            os.close(write)
        return read


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
    asked: socket.socket, child: Child, name: str, preload: Sequence[str], reporting: bool
) -> NoReturn:
    """The fork server's life; never returns into the caller's code."""
    code = 1
    try:
        release_inherited_files(asked.fileno())
        os.setsid()
        name_process("fork server of", name)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Who asked says what an interrupt means.
        os.environ.setdefault(*CUDA_BY_NVML)
        for module in preload:
            importlib.import_module(module)
        gc.freeze()
        _fork_children(asked, child, reporting)
        code = 0
    except (ImportError, OSError) as error:
        sys.stderr.write(f"error: the fork server of {name} ends: {reason(error)}\n")
    finally:
        _leave(code)


def _fork_children(asked: socket.socket, child: Child, reporting: bool) -> None:
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, str] = {}

    def report(what: Report) -> None:
        if reporting:
            with suppress(ConnectionError):  # nobody hears it
                asked.send(msgspec.json.encode(what))

    while True:
        ready, _, _ = select.select([asked.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, select.PIPE_BUF)
        for pid, code in _ended(children):
            report(Ended(children.pop(pid), pid, code))
        if asked.fileno() not in ready:
            continue
        try:
            words, files, _, _ = socket.recv_fds(asked, MESSAGE_BYTES_MAX, 1)
        except ConnectionResetError:
            break
        if not words:
            break
        pid = _fork_child(child, words, files, (asked.fileno(), wake_read, wake_write))
        for file in files:
            os.close(file)
        children[pid] = words.decode() if reporting else ""
        report(Started(children[pid], pid))
    for pid in children:
        os.kill(pid, signal.SIGKILL)
    for pid in children:
        os.waitpid(pid, 0)


def _ended(children: Mapping[int, str]) -> list[tuple[int, int]]:
    """Process ids and exit codes of those that have ended."""
    found = ((one, *os.waitpid(one, os.WNOHANG)) for one in children)
    return [(pid, os.waitstatus_to_exitcode(status)) for pid, done, status in found if done]


def _fork_child(child: Child, words: bytes, files: list[int], inherited: Sequence[int]) -> int:
    fork_server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        # Else it died before the line above could bind this process to it.
        if os.getppid() == fork_server:
            for fd in inherited:
                os.close(fd)
            code = child(words, files)
    finally:
        if sys.exc_info()[0] is not None:
            LOG.error("ended by a fault of its own", exc_info=True)
        _leave(code)


def _leave(code: int) -> NoReturn:
    """End without what the process that was forked from has to do at its end."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
