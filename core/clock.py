"""The only place that reads a clock; everything else is handed the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Two clocks and a way to spend time."""

    def now_ns(self) -> int:
        """Monotonic time of this process, ns; never decreases."""
        ...

    def wall_ns(self) -> int:
        """Wall clock, ns since 1970; for people and records, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's clocks."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
