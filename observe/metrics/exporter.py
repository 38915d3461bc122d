"""Follow a log and serve its metrics to Prometheus.

One process serves all roles, so that a killed role loses no counters. It answers 503 until the log
was read to its end once, so that no scrape sees counters climb. While the log is unreadable, the
last values remain and `log_up` is 0.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from dora_pipe.bus.bus import Bus
from dora_pipe.consumers.contributions import Contributions, contributed
from dora_pipe.core.errors import BusError, TopicMissing
from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.http_server import LOOPBACK, PageServer
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.following import follow_log
from dora_pipe.observe.metrics.metric import families
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)
CONNECTIONS_MAX: Final = 32


class Exporter(Collector):
    def __init__(self, run: str, rows: Contributions) -> None:
        self.families: list[Family] | None = None
        """Newest values; None before the log was read once."""
        self._stats = RunStats(run)
        self._rows = rows
        self._was_read = False
        self._said = ""
        self._reading = self._stats

    def collect(self) -> Iterator[Family]:
        yield from self.families or ()

    def follow(
        self, bus: Bus, topics: Topics, clock: Clock, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Read until `stop`. Raises LogTruncated."""

        def opened() -> LogFollower:
            self._reading = RunStats(topics.run)
            return self._reading.follow(bus, topics)

        def turn(follower: LogFollower) -> bool:
            self.read(follower, self._reading, stop)
            return stop()

        def away(error: BusError) -> bool:
            self._away(error)
            return stop()

        follow_log(opened, turn, clock=clock, away=away)

    def read(
        self, follower: LogFollower, stats: RunStats, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Read to the end of the log. Raises BusError."""
        while follower.advance():
            if stop():
                return
        self._stats, self._was_read, self._said = stats, True, ""
        counted = stats.contributed
        if stats.commit is not None and (counted is None or counted.step != stats.commit.step):
            rows = self._rows(stats.commit.contributions.sha256)
            stats.contributed = contributed(stats.commit.step, rows)
        self.families = families(METRICS, stats)

    def _away(self, error: BusError) -> None:
        early = isinstance(error, TopicMissing) and not self._was_read
        why = f"run {self._stats.run} to begin" if early else f"the log: {error.message}"
        if why != self._said:
            LOG.warning("metrics wait for %s", why)
            self._said = why
        if early or self.families is not None:
            self._stats.log_up = early
            self.families = families(METRICS, self._stats)


def metrics_server(exporter: Exporter, *, port: int, host: str = LOOPBACK) -> PageServer:
    """Return the server of an exporter's ``/metrics``. Raises ResourceError."""
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    registry = CollectorRegistry()
    registry.register(exporter)

    def page(request: Request) -> Response:
        if exporter.families is None:
            return PlainTextResponse("the log is being read\n", HTTPStatus.SERVICE_UNAVAILABLE)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/metrics", page)]
    return PageServer(routes, host=host, port=port, connections_max=CONNECTIONS_MAX)
