"""The servers of a task (`task.url`): which of them may be asked, and what has to be left alone.

It decides nothing but that: a server that fails is not asked for a while, for longer each time,
and then with one process, to see.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from dora_pipe.producers.tasks.calls import Answered, EpisodeLost, TaskFailed
from dora_pipe.schemas.control import INFRASTRUCTURE

LOG = logging.getLogger(__name__)

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
"""After the first, second, ... failure in a row: twice as long each time."""

BAD_MAX: Final = 8
"""Calls in a row that a process's environments let time out, or gave up (`Retry`), before its
server counts as failed."""

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


class Servers:
    """The servers of a task; of none where it runs here.

    Example: ``Servers(["tcp://games-1:7000"]).choose([], now_ns) == "tcp://games-1:7000"``.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._breakers = {url: Breaker() for url in urls}

    def __bool__(self) -> bool:
        return bool(self._breakers)

    def choose(self, used: Iterable[str], now_ns: int) -> str | None:
        """Where the next process is to be: of those that may be asked the one with the fewest of
        `used`, an URL per process; empty: here; None: nowhere, for now."""
        if not self._breakers:
            return ""
        at = Counter(used)
        may = [
            url
            for url, breaker in self._breakers.items()
            if breaker.allows(now_ns) and (breaker.proven or not at[url])
        ]
        return min(may, key=lambda url: at[url], default=None)

    def failed(self, url: str, now_ns: int, why: str) -> None:
        """Leave one alone."""
        if url in self._breakers:
            pause_s = self._breakers[url].failed(now_ns)
            LOG.warning("task: %s is left alone for %g s: %s", url, pause_s, why)

    def answered(self, url: str, event: Answered | EpisodeLost) -> bool:
        """Whether an answer shows that it works; then it may be asked as others may."""
        error = event.error if isinstance(event, TaskFailed) else ""
        if isinstance(event, EpisodeLost) or error in INFRASTRUCTURE:
            return False
        if url in self._breakers:
            self._breakers[url].worked()
        return True
