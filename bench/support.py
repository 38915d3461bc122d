"""Helpers of benchmarks: output, scratch folders, child processes."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

import msgspec

from dora_pipe.cli.output import emit_rows
from dora_pipe.core.errors import ResourceError

T = TypeVar("T")

LINE_LIMIT_S: Final = 120.0
END_LIMIT_S: Final = 10.0
READ_BYTES: Final = 1024 * 1024


def emit_figures(figures: Iterable[Any], *, as_json: bool) -> None:
    """Print dataclasses as a table or JSON lines."""
    if as_json:
        emit_rows((), (asdict(figure) for figure in figures), as_json=True)
        return
    rows = [*figures]
    if rows:
        columns = [field.name for field in fields(rows[0])]
        emit_rows(columns, [asdict(row) for row in rows], as_json=False)


@contextmanager
def scratch() -> Iterator[Path]:
    """Yield a temporary folder."""
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        yield Path(folder).resolve()


@dataclass(slots=True)
class Spent:
    wall_s: float = 0.0
    cpu_s: float = 0.0


@contextmanager
def measured(spent: Spent) -> Iterator[None]:
    """Add the time of the block to `spent`."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    spent.wall_s += time.perf_counter() - wall
    spent.cpu_s += time.process_time() - cpu


class Child:
    """Child process `python -m MODULE TASK`; exchanges lines, answers are JSON."""

    def __init__(self, module: str, task: Any) -> None:
        self._name = f"{module} ({type(task).__name__})"
        self._read = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, msgspec.json.encode(task).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    def tell(self, line: str) -> None:
        """Send a line. Raises ResourceError if it ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self, kind: type[T], *, limit_s: float = LINE_LIMIT_S) -> T:
        """Return the next answer. Raises ResourceError without one."""
        return msgspec.json.decode(self._line(limit_s), type=kind)

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(END_LIMIT_S)

    def _line(self, limit_s: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, until_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while b"\n" not in self._read:
            left_s = max(0.0, until_s - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                raise ResourceError(f"{self._name} printed nothing for {limit_s:.0f} s")
            piece = os.read(descriptor, READ_BYTES)
            if not piece:
                raise self._ended()
            self._read += piece
        line, _, self._read = self._read.partition(b"\n")
        return line

    def _ended(self) -> ResourceError:
        return ResourceError(f"{self._name} ended early", hint="its own error is printed above")


def task_of(kind: type[T]) -> T:
    """Return this child's task."""
    return msgspec.json.decode(sys.argv[1], type=kind)


def reply(answer: Any) -> None:
    """Send JSON to the parent."""
    sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
    sys.stdout.buffer.flush()


def result_of(module: str, task: Any, kind: type[T], *, limit_s: float = LINE_LIMIT_S) -> T:
    """Return a child's single answer. Raises ResourceError."""
    with Child(module, task) as child:
        return child.answer(kind, limit_s=limit_s)
