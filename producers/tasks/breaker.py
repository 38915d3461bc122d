"""Which servers of tasks are left alone for a while: those that fail again and again."""

from __future__ import annotations

from typing import Final

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
"""After the first, second, ... failure in a row: twice as long each time."""

BAD_MAX: Final = 8
"""Calls in a row that a server's environments let time out, or gave up (`Retry`), before it counts
as failed."""

_NS: Final = 1_000_000_000


class Breaker:
    """Failures of one server. Closed, it may be asked; open, it may not; half-open, it may be asked
    once, to see.

    Example::

        breaker.failed(now_ns)
        breaker.allows(now_ns)  # False, for half a second
    """

    def __init__(self) -> None:
        self._failures = 0
        self._open_until_ns = 0

    @property
    def proven(self) -> bool:
        """Whether it is closed: it has answered since it failed."""
        return self._failures == 0

    def allows(self, now_ns: int) -> bool:
        """Whether it may be asked: it is closed or half-open."""
        return now_ns >= self._open_until_ns

    def failed(self, now_ns: int) -> float:
        """It did; gives the seconds for which it is left alone."""
        pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0**self._failures)
        self._failures += 1
        self._open_until_ns = now_ns + int(pause_s * _NS)
        return pause_s

    def worked(self) -> None:
        """It answered a call."""
        self._failures = 0
