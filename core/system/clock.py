"""Clock; no other module reads the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Monotonic clock, wall clock and sleep."""

    def now_ns(self) -> int:
        """Return monotonic ns."""
        ...

    def wall_ns(self) -> int:
        """Return Unix time in ns, for people and records, never for decisions."""
        ...

    def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """Clocks of the machine."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
