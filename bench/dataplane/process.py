"""Tasks and answers of the two processes of a phase.

A process opens and warms what it needs, replies `READY`, waits for a line, works and replies its
`Done`. The assembling one is told on a second line how many records there are.
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
"""Trajectories that are published and fetched before the clock starts."""
GROUP_SIZE: Final = 8
PARTITIONS: Final = 4
SILENT_S: Final = 30.0
"""Time without a trajectory after which a phase fails."""


class Publish(msgspec.Struct, frozen=True, kw_only=True, tag="publish"):
    """Encode trajectories and append them."""

    address: str
    run: str
    tokens: int
    seconds: float
    per_s: float = 0.0
    """Trajectories that finish per second, at random moments; 0: as fast as they are encoded."""
    claims: str = ""
    """Directory of a log's large values."""


class Assemble(msgspec.Struct, frozen=True, kw_only=True, tag="assemble"):
    """Read, check and decode batches of trajectories."""

    address: str
    run: str
    batch: int
    """Trajectories of a batch; 0: as many as have come."""
    claims: str = ""


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """Work of a process between its start and its end (ns of the monotonic clock)."""

    records: int
    bytes: int
    start_ns: int
    end_ns: int
    cpu_s: float
    """CPU time without what only the benchmark does."""
    moments: list[int]
    """For each trajectory, in order: when it finished, or when its batch was ready."""


class Inside:
    """The child's own end of a phase."""

    def __init__(self) -> None:
        self.total: int | None = None
        """Records in all, once known."""

    def ready(self, *, listens: bool = False) -> int:
        """Reply READY and wait for the start; return it (ns)."""
        reply(READY)
        sys.stdin.buffer.readline()
        if listens:
            threading.Thread(target=self._listen, daemon=True).start()
        return time.monotonic_ns()

    def _listen(self) -> None:
        line = sys.stdin.buffer.readline()
        self.total = int(line) if line.strip().isdigit() else 0
