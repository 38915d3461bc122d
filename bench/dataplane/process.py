"""A process of the bench, from both sides: what it is told, what it answers, how long it may take.

A task is one JSON argument. The process opens and warms whatever it needs, says `READY` on stdout,
waits for a line on stdin, works, and prints its `Done` as one line of JSON. One that reads is told
on a second line how many records there are in all, once that is known.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Final, Literal

import msgspec

from dora_pipe.bench.processes import end
from dora_pipe.core.errors import ResourceError

READY: Final = b"ready\n"
GO: Final = b"go\n"

WARM: Final = 16
"""Trajectories that are published and fetched before the clock starts."""

GROUP_SIZE: Final = 8
PARTITIONS: Final = 4
"""Of the trajectories topic; the configuration's default."""

Side = Literal["raw", "bus"]


class Layer(msgspec.Struct, frozen=True, kw_only=True, tag="layer"):
    """Append records that were encoded before, or read them; nobody looks into them."""

    side: Side
    does: Literal["append", "read"]
    servers: str
    topic: str
    tokens: int
    seconds: float
    """Of appending."""
    per_s: float = 0.0
    """One record a call, so many a second at even gaps; 0: many a call, as fast as it goes."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Encode trajectories and append them."""

    address: str
    run: str
    tokens: int
    seconds: float
    per_s: float = 0.0
    """They finish at random moments, so many a second; 0: the next one when the last is encoded."""
    routes: bool = False
    """With the experts that each token passed."""
    claims: str = ""
    """Directory of a log's large values."""


class Assemble(msgspec.Struct, frozen=True, kw_only=True, tag="assemble"):
    """Read, check and decode batches of trajectories as the trainer does."""

    address: str
    run: str
    batch: int
    """Trajectories; 0: whatever has come."""
    routes: bool = False
    """As `Publish.routes`."""
    claims: str = ""
    """As `Publish.claims`."""


Task = Layer | Publish | Assemble


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a process did between its start and its end (ns of the machine's monotonic clock)."""

    records: int
    bytes: int
    """Of their values."""
    start_ns: int
    end_ns: int
    cpu_s: float
    stages: dict[str, float] = {}
    """CPU seconds by stage; `own` is what only the bench does, and counts nowhere."""
    moments: dict[str, list[int]] = {}
    """For each trajectory behind the warm ones, in order: when it had come so far (ns)."""


class Stopwatch:
    """What this process spends from now on."""

    def __init__(self) -> None:
        self.start_ns = time.monotonic_ns()
        self._start_cpu_s = time.process_time()

    def stop(self, *, records: int, value_bytes: int, end_ns: int = 0) -> Done:
        """What it did until now, or until `end_ns`."""
        return Done(
            records=records,
            bytes=value_bytes,
            start_ns=self.start_ns,
            end_ns=end_ns or time.monotonic_ns(),
            cpu_s=time.process_time() - self._start_cpu_s,
        )


TASK: Final = msgspec.json.Decoder(Task)
DONE: Final = msgspec.json.Decoder(Done)

LINE_LIMIT_S: Final = 120.0
"""For one line of a process that works: to be ready, or done."""

_READ_BYTES: Final = 1024 * 1024
_CHILD: Final = "dora_pipe.bench.dataplane.child"
_NOTHING_MORE: Final[Mapping[str, str]] = {}


class Child:
    """A process of the bench, from the outside; leaving its `with` ends it."""

    def __init__(
        self,
        task: Task,
        *,
        pass_fds: Sequence[int] = (),
        python: str = sys.executable,
        environment: Mapping[str, str] = _NOTHING_MORE,
    ) -> None:
        self._what = type(task).__name__
        self._read = b""
        self._process = subprocess.Popen(
            [python, "-m", _CHILD, msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=pass_fds,
            bufsize=0,
            env={**os.environ, **environment},
        )

    def await_ready(self) -> None:
        """Return when it has opened and warmed what it needs. Raises ResourceError."""
        line = self._line()
        if line != READY:
            raise ResourceError(f"a process of the bench says {line[:60]!r}")

    def go(self) -> None:
        """Start the clock."""
        self._say(GO)

    def send_total(self, records: int) -> None:
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
            f"a process of the bench ({self._what}) ended early", hint="what it said stands above"
        )


class Inside:
    """The process's own end: stdin and stdout."""

    def __init__(self) -> None:
        self.total: int | None = None
        """Records in all, once it is known."""

    def ready(self) -> Stopwatch:
        """Say so, and wait for the start."""
        sys.stdout.buffer.write(READY)
        sys.stdout.buffer.flush()
        if sys.stdin.buffer.readline() != GO:
            sys.exit("the bench has gone")
        return Stopwatch()

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
