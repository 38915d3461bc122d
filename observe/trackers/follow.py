"""Gives a tracker the rows of a run from its log; it decides when to wait, and when to give up.

Like the traces: nothing is buffered, and while the log is away nothing is lost. Which rows are
there the tracker knows, so an export that goes on gives no row twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError
from dora_pipe.observe.following import follow_log
from dora_pipe.observe.run_stats import Contributions
from dora_pipe.observe.trackers.figures import FigureStats
from dora_pipe.observe.trackers.sink import TrackedRun, Tracker
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)


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
        self._stats = FigureStats(topics.run, rows, begin=self._begin)

    def whole(self) -> Tracked:
        """Give everything that is in the log now. Raises BusError, and what the tracker raises."""
        with closing(self._opened()) as follower:
            self._read(follower)
        return self._done()

    def follow(self, stop: Callable[[], bool] = lambda: False) -> Tracked:
        """Give rows until the run is over or `stop` says so.

        Raises LogTruncated for a log that has lost records, and what the tracker raises.
        """

        def turn(follower: LogFollower) -> bool:
            self._read(follower)
            return self._stats.over or stop()

        def away(error: BusError) -> bool:
            LOG.warning("figures wait: the log is away: %s", error.message)
            return stop()

        follow_log(self._opened, turn, clock=self._clock, away=away)
        return self._done()

    def _opened(self) -> LogFollower:
        self._stats = FigureStats(self._topics.run, self._contributions, begin=self._begin)
        return LogFollower(self._bus, self._topics, self._stats)

    def _begin(self, fact: RunStarted) -> int:
        """How many rows are not wanted; the log may be read from its beginning again."""
        if self._before is None:
            run = TrackedRun(name=fact.run, started_ns=fact.at_ns, config=fact.config)
            self._before = self._tracker.begin(run)
        return self._before + self._given

    def _read(self, follower: LogFollower) -> None:
        """Read to the present end of the log, and give its rows."""
        more = True
        while more:
            more = follower.advance()
            for row in self._stats.drain():
                self._tracker.step(row.step, row.figures, at_ns=row.at_ns)
                self._given += 1

    def _done(self) -> Tracked:
        return Tracked(rows=self._given, before=self._before or 0, over=self._stats.over)
