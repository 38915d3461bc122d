"""Follows a log and serves its metrics; it decides what is answered while the log is away.

One process per run makes the metrics of all its roles, from the log that they write anyway: they
serve nothing, hold no counters, and lose none when they die. Until the log was read to its end for
the first time there is no answer, so that no counter is seen climbing to where it was; while the
log is away there are the last values, and `log_up` is 0. A log that is there and has no such run
yet is waited for: that much is known of it, so it is answered, with zeros.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from dora_pipe.bus.port import Bus
from dora_pipe.catalogue.follower import LogFollower
from dora_pipe.core.clock import Clock
from dora_pipe.core.errors import BusError, LogTruncated, TopicMissing
from dora_pipe.core.local_http import LOOPBACK, LocalHandler, LocalServer
from dora_pipe.observe.metrics.exposition import CONTENT_TYPE, exposition
from dora_pipe.observe.metrics.table import METRICS
from dora_pipe.observe.run_stats import Contributions, RunStats, contributed
from dora_pipe.schemas.topics import Topics

LOG = logging.getLogger(__name__)

TURN_S: Final = 1.0
"""Between two looks at the log: values are so old at most, beside the time of a heartbeat."""

RETRY_FIRST_S: Final = 0.5
RETRY_MAX_S: Final = 10.0
"""Between two tries while the log is away: twice as long each time."""

REQUESTS_MAX: Final = 8
"""At once; more are refused."""

IDLE_S: Final = 10.0
"""A connection that sends nothing is closed."""


class Exporter:
    """The metrics of one run. Example: ``Exporter("demo", rows).follow(bus, topics, clock)``."""

    def __init__(self, run: str, rows: Contributions) -> None:
        self.page: bytes | None = None
        """What Prometheus is answered; None before the log was read once."""
        self._stats = RunStats(run)
        self._rows = rows
        self._was_read = False
        self._said = ""

    def follow(
        self, bus: Bus, topics: Topics, clock: Clock, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Until `stop` says so. Raises LogTruncated for a log that has lost what was read."""
        retry_s = RETRY_FIRST_S
        while not stop():
            follower = None
            try:
                stats = RunStats(topics.run)
                follower = stats.follow(bus, topics)
                while not stop():
                    self.read(follower, stats, stop)
                    retry_s = RETRY_FIRST_S
                    clock.sleep(TURN_S)
            except LogTruncated:
                raise
            except BusError as error:
                self._away(error)
                clock.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)
            finally:
                if follower is not None:
                    follower.close()

    def read(
        self, follower: LogFollower, stats: RunStats, stop: Callable[[], bool] = lambda: False
    ) -> None:
        """Read to the present end of the log, and write the page anew. Raises BusError."""
        while follower.advance():
            if stop():
                return
        self._stats = stats
        self._was_read, self._said = True, ""
        self._look_at_ratios()
        self._write()

    def _look_at_ratios(self) -> None:
        """The contributions of the newest step, once."""
        stats = self._stats
        known = stats.contributed
        if stats.commit is not None and (known is None or known.step != stats.commit.step):
            rows = self._rows(stats.commit.contributions.sha256)
            stats.contributed = contributed(stats.commit.step, rows)

    def _away(self, error: BusError) -> None:
        """Say once what is waited for; let the page say it too where there is one."""
        early = isinstance(error, TopicMissing) and not self._was_read
        why = f"run {self._stats.run} to begin" if early else f"the log: {error.message}"
        if why != self._said:
            LOG.warning("metrics wait for %s", why)
            self._said = why
        if early or self.page is not None:
            self._stats.log_up = early
            self._write()

    def _write(self) -> None:
        self.page = exposition(METRICS, self._stats).encode()


class MetricsServer(LocalServer):
    """``/metrics`` of an exporter. Example: ``MetricsServer(exporter, port=0).start()``."""

    def __init__(self, exporter: Exporter, *, port: int, host: str = LOOPBACK) -> None:
        self.exporter = exporter
        super().__init__(_Handler, host=host, port=port, requests_max=REQUESTS_MAX)

    @property
    def address(self) -> str:
        """What Prometheus is told to scrape."""
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/metrics"

    def start(self) -> None:
        """Answer in a thread of its own, until the process ends or `shutdown`."""
        threading.Thread(target=self.serve_forever, name="metrics", daemon=True).start()


class _Handler(LocalHandler):
    server: MetricsServer
    timeout = IDLE_S

    def answer(self) -> None:
        """See the base."""
        if self.path.partition("?")[0] != "/metrics":
            self.say(HTTPStatus.NOT_FOUND, "there is only /metrics")
        elif self.server.exporter.page is None:
            self.say(HTTPStatus.SERVICE_UNAVAILABLE, "the log is being read")
        else:
            self._send(HTTPStatus.OK, self.server.exporter.page)

    def say(self, status: HTTPStatus, text: str) -> None:
        """See the base."""
        self._send(status, f"{text}\n".encode())

    def _send(self, status: HTTPStatus, body: bytes) -> None:
        self.send_whole(status, {"Content-Type": CONTENT_TYPE}, body)
