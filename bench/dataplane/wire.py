"""Both ends of the line between the bench and its processes; decides how long it waits for one."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Final

import msgspec

from dora_pipe.bench.dataplane.tasks import DONE, GO, READY, Done, Task
from dora_pipe.bench.processes import end
from dora_pipe.core.errors import ResourceError

LINE_LIMIT_S: Final = 120.0
"""For one line of a process that works: to be ready, or done."""

_READ_BYTES: Final = 1024 * 1024
_CHILD: Final = "dora_pipe.bench.dataplane.child"


class Child:
    """A process of the bench, from the outside; leaving its `with` ends it."""

    def __init__(self, task: Task, *, pass_fds: Sequence[int] = ()) -> None:
        self._what = type(task).__name__
        self._read = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", _CHILD, msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            bufsize=0,
        )

    def await_ready(self) -> None:
        """Return when it has opened and warmed what it needs. Raises ResourceError."""
        line = self._line()
        if line != READY:
            raise ResourceError(f"a process of the bench says {line[:60]!r}")

    def go(self) -> None:
        """Start the clock."""
        self._say(GO)

    def tell_total(self, records: int) -> None:
        """How many records there are in all, behind the warm ones."""
        self._say(b"%d\n" % records)

    def done(self) -> Done:
        """What it counted. Raises ResourceError."""
        return DONE.decode(self._line())

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        end(self._process, at_once=kind is not None)

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line)
        except BrokenPipeError:
            raise self._gone() from None

    def _line(self) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        limit_s = time.monotonic() + LINE_LIMIT_S
        while b"\n" not in self._read:
            ready, _, _ = select.select([fd], [], [], max(0.0, limit_s - time.monotonic()))
            if not ready:
                raise ResourceError(f"a process of the bench ({self._what}) says nothing")
            piece = os.read(fd, _READ_BYTES)
            if not piece:
                raise self._gone()
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line + b"\n"

    def _gone(self) -> ResourceError:
        return ResourceError(
            f"a process of the bench ({self._what}) ended early",
            hint="what it said stands above",
        )


class Inside:
    """The process's own end: stdin and stdout."""

    def __init__(self) -> None:
        self.total: int | None = None
        """Records in all, once it is known."""

    def ready(self) -> None:
        """Say so, and wait for the start."""
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        if sys.stdin.buffer.readline() != GO:
            sys.exit("the bench has gone")

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Meanwhile a second line may say how many records there are."""
        threading.Thread(target=self._listen, name="total", daemon=True).start()
        yield

    def answer(self, done: Done) -> None:
        """The last line."""
        sys.stdout.buffer.write(msgspec.json.encode(done) + b"\n")
        sys.stdout.buffer.flush()

    def _listen(self) -> None:
        line = sys.stdin.buffer.readline()
        self.total = int(line) if line.strip().isdigit() else 0
