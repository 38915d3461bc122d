"""Follow a log and serve its metrics to Prometheus.

One process serves all roles, so that a killed role loses no counters. It answers 503 until the log
was read to its end once, so that no scrape sees counters climb. While the log is unreadable, the
last values remain and `log_up` is 0.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final, Self
from urllib.parse import urlsplit

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from dora_pipe.bus.bus import Bus
from dora_pipe.core.errors import BusError, TopicMissing
from dora_pipe.core.system.clock import Clock
from dora_pipe.core.system.local_http import LOOPBACK, LocalHandler, LocalServer
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.following import follow_log
from dora_pipe.observe.metrics.metric import families
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.ratios import Contributions, contributed
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

IDLE_S: Final = 10.0

REQUESTS_MAX: Final = 8


class Exporter(Collector):
    """Metrics of one run. Example: ``Exporter("demo", rows).follow(bus, topics, clock)``."""

    def __init__(self, run: str, rows: Contributions) -> None:
        self.families: list[Family] | None = None
        """Newest values; None before the log was read once."""
        self._stats = RunStats(run)
        self._rows = rows
        self._was_read = False
        self._said = ""
        self._reading = self._stats

    def collect(self) -> Iterator[Family]:
        """Return the newest values."""
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


class MetricsServer(LocalServer):
    """Serve ``/metrics`` of an exporter. Example: ``MetricsServer(exporter, port=0).start()``."""

    def __init__(self, exporter: Exporter, *, port: int, host: str = LOOPBACK) -> None:
        self.exporter = exporter
        self.registry = CollectorRegistry()
        self.registry.register(exporter)
        super().__init__(_Handler, host=host, port=port, requests_max=REQUESTS_MAX)

    @property
    def address(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.port}/metrics"

    @property
    def port(self) -> int:
        return self.server_port

    def __enter__(self) -> Self:
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Handler(LocalHandler):
    server: MetricsServer
    timeout = IDLE_S

    def answer(self) -> None:
        if urlsplit(self.path).path != "/metrics":
            self.say(HTTPStatus.NOT_FOUND, "there is only /metrics")
        elif self.server.exporter.families is None:
            self.say(HTTPStatus.SERVICE_UNAVAILABLE, "the log is being read")
        else:
            headers = {"Content-Type": CONTENT_TYPE_LATEST}
            self.send_whole(HTTPStatus.OK, headers, generate_latest(self.server.registry))

    def say(self, status: HTTPStatus, text: str) -> None:
        headers = {"Content-Type": "text/plain; charset=utf-8"}
        self.send_whole(status, headers, f"{text}\n".encode())
