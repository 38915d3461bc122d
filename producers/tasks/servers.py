"""Where a task runs, on its servers (`task.url`) or here: which of these places may be asked, and
which has to be left alone.

It decides nothing but that: a place that fails is not asked for a while, for longer each time, and
then with one process, to see.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.tasks.calls import Answered, EpisodeLost, PromptReady, TaskFailed
from dora_pipe.schemas.control import INFRASTRUCTURE
from dora_pipe.schemas.metrics import FailingPlace

LOG = logging.getLogger(__name__)

PAUSE_FIRST_S: Final = 0.5
PAUSE_MAX_S: Final = 30.0
"""After the first, second, ... failure in a row: twice as long each time."""

BAD_MAX: Final = 8
"""Calls in a row that timed out or were given up (`Retry`), of a process or in a place, before the
place counts as failed."""

BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
"""Before the second, third, ... process in a row is started again; the first at once."""

HERE: Final = ""
"""The place of a task without servers."""

WHY_CHARACTERS_MAX: Final = 200

_NS: Final = 1_000_000_000


class Breaker:
    """Failures of one place. Closed, it may be asked; open, it may not; half-open, it may be asked
    once, to see.

    Example::

        breaker.failed(now_ns)
        breaker.allows(now_ns)  # False, for half a second
    """

    def __init__(self) -> None:
        self.failures = 0
        """In a row."""
        self.tries = 0
        """Processes that were begun there since the first of them."""
        self.bad = 0
        """Calls in a row that failed there, since it counted as failed last."""
        self.since_ns = 0
        """When the first of the failures was: wall clock."""
        self.why = ""
        """The last of them."""
        self._open_until_ns = 0

    @property
    def proven(self) -> bool:
        """Whether it is closed: it has answered since it failed."""
        return self.failures == 0

    def allows(self, now_ns: int) -> bool:
        """Whether it may be asked: it is closed or half-open."""
        return now_ns >= self._open_until_ns

    def failed(self, now_ns: int, why: str = "", *, wall_ns: int = 0) -> float:
        """It did; gives the seconds for which it is left alone."""
        pause_s = min(PAUSE_MAX_S, PAUSE_FIRST_S * 2.0**self.failures)
        if not self.failures:
            self.since_ns, self.tries = wall_ns, 0
        self.failures, self.bad, self.why = self.failures + 1, 0, why
        self._open_until_ns = now_ns + int(pause_s * _NS)
        return pause_s

    def worked(self) -> None:
        """It answered a call."""
        self.failures = self.bad = 0


class Places:
    """The servers of a task, or `HERE` alone.

    Example: ``Places(["tcp://games-1:7000"], "games", clock.wall_ns).choose([], now_ns)``.
    """

    def __init__(self, urls: Sequence[str], task: str, wall_ns: Callable[[], int]) -> None:
        """`task`: what it is called."""
        self._task, self._wall_ns = task, wall_ns
        self._breakers = {url: Breaker() for url in urls or (HERE,)}

    @property
    def elsewhere(self) -> bool:
        return HERE not in self._breakers

    @property
    def count(self) -> int:
        return len(self._breakers)

    def failing(self, now_ns: int) -> list[FailingPlace]:
        """Those that have failed, and not answered since."""
        return [
            FailingPlace(
                task=self._task,
                url=url,
                failures=one.failures,
                tries=one.tries,
                since_ns=one.since_ns,
                left_alone=not one.allows(now_ns),
                why=one.why[:WHY_CHARACTERS_MAX],
            )
            for url, one in self._breakers.items()
            if not one.proven
        ]

    def choose(self, used: Iterable[str], now_ns: int) -> str | None:
        """Where the next process is begun: of those that may be asked the one with the fewest of
        `used`, a place per process; None: nowhere, for now."""
        at = Counter(used)
        may = [
            url
            for url, breaker in self._breakers.items()
            if breaker.allows(now_ns) and (breaker.proven or not at[url])
        ]
        found = min(may, key=lambda url: at[url], default=None)
        if found is not None:
            self._breakers[found].tries += 1
        return found

    def failed(self, url: str, now_ns: int, why: str) -> None:
        """Leave one alone."""
        pause_s = self._breakers[url].failed(now_ns, why, wall_ns=self._wall_ns())
        place = url or f"task {self._task}".strip()
        LOG.warning("task: %s is left alone for %g s: %s", place, pause_s, why)

    def bad(self, url: str) -> int:
        """A call failed there; how many in a row have."""
        self._breakers[url].bad += 1
        return self._breakers[url].bad

    def worked(self, url: str) -> None:
        """A call was answered there; it may be asked as others may."""
        self._breakers[url].worked()


class Deaths:
    """Processes that died in a row without one answer, and when the next one may be started."""

    def __init__(self, *, elsewhere: bool) -> None:
        """`elsewhere`: they are connections to servers."""
        self._elsewhere = elsewhere
        self.in_a_row = 0
        self.start_at_ns = 0

    def count(self, now_ns: int, message: str, most: int) -> None:
        """One more, or a connection to a server. Raises TaskError where they are `most`."""
        self.in_a_row += 1
        if self.in_a_row >= most:
            what, hint = ("task processes in a row died", "what they wrote to stderr may tell why")
            if self._elsewhere:
                what = "connections to servers of the task in a row ended"
                hint = "`dora-pipe task serve` has to run where task.url says"
            raise TaskError(
                f"{most} {what} without answering anything; the last: {message}", hint=hint
            )
        again = self.in_a_row - 2
        pause_s = 0.0 if again < 0 else min(BACKOFF_MAX_S, BACKOFF_FIRST_S * 2.0**again)
        self.start_at_ns = now_ns + int(pause_s * _NS)


def words_of(event: Answered | EpisodeLost) -> str:
    """What failed, for one line."""
    error = event.error if isinstance(event, TaskFailed) else type(event).__name__
    return f"{error}: {getattr(event, 'message', '')}"


def is_working(event: Answered | EpisodeLost) -> bool | None:
    """Whether an answer shows that what gave it works; None for one that shows nothing: an episode
    that has begun may still fail at its first step."""
    if isinstance(event, PromptReady) and event.episode:
        return None
    error = event.error if isinstance(event, TaskFailed) else ""
    return not isinstance(event, EpisodeLost) and error not in INFRASTRUCTURE
