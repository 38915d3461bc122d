"""Protocol of the two processes.

A process replies `READY`, waits for a line, works, and replies `Done`. The assembling one gets the
number of records in a second line.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Final

import msgspec

from dora_pipe.bench.support import reply

READY: Final = "ready"
WARM: Final = 16
GROUP_SIZE: Final = 8
PARTITIONS: Final = 4
SILENT_S: Final = 30.0
"""Timeout in s without a trajectory."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Encode and append trajectories."""

    address: str
    run: str
    tokens: int
    seconds: float
    per_s: float = 0.0
    """Trajectories per second at random times; 0 is full speed."""
    blobs: str = ""


class Assemble(msgspec.Struct, frozen=True, kw_only=True, tag="assemble"):
    """Read, check and decode batches."""

    address: str
    run: str
    batch: int
    """Trajectories of a batch; 0 takes all available."""
    blobs: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Result; times in ns of the monotonic clock."""

    records: int
    bytes: int
    start_ns: int
    end_ns: int
    cpu_s: float
    """CPU time without the benchmark's own."""
    moments: list[int]
    """Finish time, or time of the ready batch, per trajectory in order."""


class Inside:
    def __init__(self) -> None:
        self.total: int | None = None

    def ready(self, *, listens: bool = False) -> int:
        """Reply READY; return the start in ns."""
        reply(READY)
        sys.stdin.buffer.readline()
        if listens:
            threading.Thread(target=self._listen, daemon=True).start()
        return time.monotonic_ns()

    def _listen(self) -> None:
        line = sys.stdin.buffer.readline()
        self.total = int(line) if line.strip().isdigit() else 0
