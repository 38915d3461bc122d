"""Gives a tracker the rows of a run from its log; it decides when to wait, and when to give up.

Like the traces: nothing is buffered, and while the log is away nothing is lost. Which rows are
there the tracker knows, so an export that goes on gives no row twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, LogTruncated
from dora_pipe.observe.run_stats import Contributions
from dora_pipe.observe.trackers.figures import FigureStats
from dora_pipe.observe.trackers.port import TrackedRun, Tracker
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

TURN_S: Final = 1.0
"""Between two looks at a log that goes on: rows come so late at most."""

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 10.0
"""Between two tries while the log is away: twice as long each time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tracked:
    """What an export has done."""

    rows: int
    """That were given to the tracker."""
    before: int
    """That were there already."""
    over: bool
    """The run is over, so no more will come."""


class Tracking:
    """One export of one run. Example: ``Tracking(bus, topics, tracker, rows, clock).whole()``."""

    def __init__(
        self, bus: Bus, topics: Topics, tracker: Tracker, rows: Contributions, clock: Clock
    ) -> None:
        self._bus, self._topics, self._tracker = bus, topics, tracker
        self._contributions, self._clock = rows, clock
        self._before: int | None = None
        """Rows that were there when it began; None before the run was met."""
        self._given = 0

    def whole(self) -> Tracked:
        """Everything that is in the log now. Raises BusError, and what the tracker raises."""
        stats, follower = self._open()
        with closing(follower):
            while self._turn(stats, follower):
                pass
        return self._done(over=stats.over)

    def follow(self, stop: Callable[[], bool] = lambda: False) -> Tracked:
        """Until the run is over or `stop` says so; waits for a log that is away.

        Raises LogTruncated for a log that has lost what was read, and what the tracker raises.
        """
        retry_s = RETRY_FIRST_S
        while True:
            follower = None
            try:
                stats, follower = self._open()
                while True:
                    more = self._turn(stats, follower)
                    retry_s = RETRY_FIRST_S
                    if not more and (stats.over or stop()):
                        return self._done(over=stats.over)
                    if not more:
                        self._clock.sleep(TURN_S)
            except LogTruncated:
                raise
            except BusError as error:
                if stop():
                    return self._done(over=False)
                LOG.warning("figures wait: the log is away: %s", error.message)
                self._clock.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            finally:
                if follower is not None:
                    follower.close()

    def _open(self) -> tuple[FigureStats, LogFollower]:
        stats = FigureStats(self._topics.run, self._contributions, begin=self._begin)
        return stats, LogFollower(self._bus, self._topics, stats, lent=stats.account.lend)

    def _begin(self, fact: RunStarted) -> int:
        """How many rows are not wanted; the log may be read from its beginning again."""
        if self._before is None:
            run = TrackedRun(name=fact.run, started_ns=fact.at_ns, config=fact.config)
            self._before = self._tracker.begin(run)
        return self._before + self._given

    def _turn(self, stats: FigureStats, follower: LogFollower) -> bool:
        """Read a piece and give its rows; whether there was something to read."""
        more = follower.advance()
        for row in stats.drain():
            self._tracker.step(row.step, row.figures, at_ns=row.at_ns)
            self._given += 1
        return more

    def _done(self, *, over: bool) -> Tracked:
        return Tracked(rows=self._given, before=self._before or 0, over=over)
