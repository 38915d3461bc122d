"""Health of a task's locations, its servers or this machine. A failed one is paused, then tested
with one process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.calls import Answered, EpisodeLost, PromptReady, TaskFailed
from dora_pipe.schemas.control import INFRASTRUCTURE
from dora_pipe.schemas.metrics import FailingServer

LOG = logging.getLogger(__name__)

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
"""Doubles after each failure."""

BAD_MAX: Final = 8
"""Consecutive timeouts or `Retry` that count as a failure."""

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
"""The first restart is immediate."""

HERE: Final = ""
"""Location of a task without servers."""

REASON_CHARACTERS_MAX: Final = 200

_NS: Final = 1_000_000_000


class Breaker:
    """Circuit breaker of one location: closed, open (paused) or half-open (one test)."""

    def __init__(self) -> None:
        self.failures = 0
        self.tries = 0
        """Processes started since the first failure."""
        self.bad = 0
        """Consecutive failed calls."""
        self.since_ns = 0
        """First failure (wall clock)."""
        self.why = ""
        self._open_until_ns = 0

    @property
    def proven(self) -> bool:
        return self.failures == 0

    def allows(self, now_ns: int) -> bool:
        return now_ns >= self._open_until_ns

    def failed(self, now_ns: int, why: str = "", *, wall_ns: int = 0) -> float:
        pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0**self.failures)
        if not self.failures:
            self.since_ns, self.tries = wall_ns, 0
        self.failures, self.bad, self.why = self.failures + 1, 0, why
        self._open_until_ns = now_ns + int(pause_s * _NS)
        return pause_s

    def worked(self) -> None:
        self.failures = self.bad = 0


class Places:
    """Servers of a task, or only `HERE`."""

    def __init__(self, urls: Sequence[str], task: str, wall_ns: Callable[[], int]) -> None:
        self._task, self._wall_ns = task, wall_ns
        self.breakers = {url: Breaker() for url in urls or (HERE,)}

    def failing(self, now_ns: int) -> list[FailingServer]:
        return [
            FailingServer(
                task=self._task,
                url=url,
                failures=breaker.failures,
                tries=breaker.tries,
                since_ns=breaker.since_ns,
                suspended=not breaker.allows(now_ns),
                reason=breaker.why[:REASON_CHARACTERS_MAX],
            )
            for url, breaker in self.breakers.items()
            if not breaker.proven
        ]

    def choose(self, used: Iterable[str], now_ns: int) -> str | None:
        """Return the usable location with the fewest processes."""
        processes = Counter(used)
        may = [
            url
            for url, breaker in self.breakers.items()
            if breaker.allows(now_ns) and (breaker.proven or not processes[url])
        ]
        chosen = min(may, key=lambda url: processes[url], default=None)
        if chosen is not None:
            self.breakers[chosen].tries += 1
        return chosen

    def failed(self, url: str, now_ns: int, why: str) -> None:
        pause_s = self.breakers[url].failed(now_ns, why, wall_ns=self._wall_ns())
        location = url or f"task {self._task}".strip()
        LOG.warning("task: %s paused for %g s: %s", location, pause_s, why)


class Deaths:
    """Counts consecutive deaths without an answer and delays the next start."""

    def __init__(self, *, of_servers: bool) -> None:
        self._of_servers = of_servers
        self.in_a_row = 0
        self.start_at_ns = 0

    def count(self, now_ns: int, message: str, most: int) -> None:
        """Raises TaskError at `most`."""
        self.in_a_row += 1
        if self.in_a_row >= most:
            what, hint = ("consecutive task processes died", "see their stderr")
            if self._of_servers:
                what = "consecutive task server connections ended"
                hint = "`dora-pipe task-server` must run at the address in task.url"
            raise TaskError(
                f"{most} {what} without answering anything; the last: {message}", hint=hint
            )
        again = self.in_a_row - 2
        pause_s = 0.0 if again < 0 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0**again)
        self.start_at_ns = now_ns + int(pause_s * _NS)


def words_of(event: Answered | EpisodeLost) -> str:
    error = event.error if isinstance(event, TaskFailed) else type(event).__name__
    return f"{error}: {getattr(event, 'message', '')}"


def is_working(event: Answered | EpisodeLost) -> bool | None:
    """Return whether a process works; None for a new episode, whose first step may fail."""
    if isinstance(event, PromptReady) and event.episode:
        return None
    error = event.error if isinstance(event, TaskFailed) else ""
    return not isinstance(event, EpisodeLost) and error not in INFRASTRUCTURE
