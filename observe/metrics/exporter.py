"""Follow a log and serve its metrics to Prometheus.

One process per run makes the metrics of all its roles from the log that they write anyway. Before
the log was read to its end for the first time the answer is 503, so that no counter is seen
climbing to its value. While the log cannot be read the last values stay, and `log_up` is 0. A run
that has not begun is answered with zeros. Counters in the roles would be lost with a killed role.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, ResourceError, TopicMissing
from dora_pipe.core.local_http import LOOPBACK, is_own_name
from dora_pipe.observe.following import follow_log
from dora_pipe.observe.metrics.metric import families
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import Contributions, RunStats, contributed
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

IDLE_S: Final = 10.0
"""A connection that sends nothing for this time is closed."""


class Exporter(Collector):
    """The metrics of one run. Example: ``Exporter("demo", rows).follow(bus, topics, clock)``."""

    def __init__(self, run: str, rows: Contributions) -> None:
        self.families: list[Family] | None = None
        """The newest values; None before the log was read once."""
        self._stats = RunStats(run)
        self._rows = rows
        self._was_read = False
        self._said = ""
        self._reading = self._stats

    def collect(self) -> Iterator[Family]:
        """The newest values, for a registry of prometheus_client."""
        yield from self.families or ()

    def follow(
        self, bus: Bus, topics: Topics, clock: Clock, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Read until `stop` says so. Raises LogTruncated for a log that has lost records."""

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
        """Read to the present end of the log, and renew the values. Raises BusError."""
        while follower.advance():
            if stop():
                return
        self._stats, self._was_read, self._said = stats, True, ""
        known = stats.contributed
        if stats.commit is not None and (known is None or known.step != stats.commit.step):
            rows = self._rows(stats.commit.contributions.sha256)
            stats.contributed = contributed(stats.commit.step, rows)
        self.families = families(METRICS, stats)

    def _away(self, error: BusError) -> None:
        """Say once what is waited for; change `log_up` where there are values."""
        early = isinstance(error, TopicMissing) and not self._was_read
        why = f"run {self._stats.run} to begin" if early else f"the log: {error.message}"
        if why != self._said:
            LOG.warning("metrics wait for %s", why)
            self._said = why
        if early or self.families is not None:
            self._stats.log_up = early
            self.families = families(METRICS, self._stats)


class MetricsServer:
    """``/metrics`` of an exporter. Example: ``MetricsServer(exporter, port=0).start()``."""

    def __init__(self, exporter: Exporter, *, port: int, host: str = LOOPBACK) -> None:
        registry = CollectorRegistry()
        registry.register(exporter)
        self.exporter = exporter
        self._page = make_wsgi_app(registry)
        self._own_names_only = host == LOOPBACK
        try:
            self._server = make_server(
                host, port, self._answer, server_class=ThreadingWSGIServer, handler_class=_Handler
            )
        except OSError as error:
            raise ResourceError(
                f"cannot listen on port {port} of {host}: {error.strerror}",
                hint="choose another one with --port, or 0 for any",
            ) from None

    @property
    def address(self) -> str:
        """The address for Prometheus to scrape."""
        return f"http://{self._server.server_address[0]!s}:{self.port}/metrics"

    @property
    def port(self) -> int:
        """The port that is listened on."""
        return self._server.server_port

    def start(self) -> None:
        """Answer in a thread of its own, until `close`."""
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        """The library's page, or why there is none."""
        status = ""
        if self._own_names_only and not is_own_name(environ.get("HTTP_HOST", "")):
            status, text = "421 Misdirected Request", b"ask for it by the name localhost\n"
        elif environ["PATH_INFO"] != "/metrics":
            status, text = "404 Not Found", b"there is only /metrics\n"
        elif self.exporter.families is None:
            status, text = "503 Service Unavailable", b"the log is being read\n"
        if not status:
            found: Iterable[bytes] = self._page(environ, start)
            return found
        start(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text]


class _Handler(WSGIRequestHandler):
    timeout = IDLE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
