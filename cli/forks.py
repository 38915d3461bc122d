"""A process that has imported what helpers need and forks one when it is asked; decides nothing.

It is forked before anything is open, so that helpers start clean; they share what is imported,
which would cost each half a second. They end with the pipe that they write to, and all of them when
who asked is gone.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import IO, Final, NoReturn, Self

from dora_pipe.cli.zygote import close_all_but
from dora_pipe.errors import ResourceError

WORDS_BYTES_MAX: Final = 1 << 17
"""Of what a helper is asked for: a message that is taken whole or not at all."""

OUT_BYTES: Final = 1 << 20

Work = Callable[[bytes, IO[bytes]], None]
"""What a helper does: the words that it is asked with, and where it writes."""


class Forks:
    """The end of who asks. Make it before anything is open.

    Example: ``with Forks(work) as forks: fd = forks.start(b"...")``.
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
        close_all_but(asked.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Who asked says what an interrupt means.
        gc.freeze()
        _fork_helpers(work, asked)
        code = 0
    except OSError as error:
        sys.stderr.write(f"error: what starts helpers ends: {error}\n")
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
