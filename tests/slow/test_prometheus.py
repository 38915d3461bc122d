"""Tests of a real Prometheus that scrapes a live run and answers every documented query."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora_pipe.bus.sqlite import SqliteBus
from dora_pipe.consumers.contributions import read_contributions
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.observe.metrics.exporter import Exporter, metrics_server
from dora_pipe.schemas.metrics import FailingServer
from tests.support.cluster import Cluster, TorchParts, make_config
from tests.support.models import make_qwen2
from tests.support.prometheus import DASHBOARDS, Prometheus, missing
from tests.unit.test_observe import RULES

pytestmark = pytest.mark.slow

INTERVAL = "30s"
"""What Grafana would put in place of $__rate_interval."""


QUERIES = [
    (path.stem, panel["title"], target["expr"])
    for path in DASHBOARDS
    for panel in json.loads(path.read_text())["panels"]
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    if missing():
        pytest.skip(missing())
    folder = tmp_path_factory.mktemp("prometheus")
    config = make_config(
        run__steps=6,
        run__name="scraped",
        task__name="sums",
        sampling__max_tokens=24,
        evaluation__every=1,
    )
    parts = TorchParts(make_qwen2(folder / "model"))
    failing = FailingServer(
        task="sums", failures=3, since_ns=1, reason="a place that does not answer"
    )
    with Cluster(
        folder / "run", config, parts=parts, workers=("w0", "w1"), failing=(failing,)
    ) as cluster:
        cluster.until(lambda: cluster.version >= 2)
        exporter = Exporter(
            "scraped", lambda sha: read_contributions(cluster.store.blob("contributions", sha))
        )
        with metrics_server(exporter, port=0) as server:
            following = _Following(exporter, cluster, folder)
            target = server.origin.removeprefix("http://")
            with following, Prometheus(folder, target) as prometheus:
                prometheus.until(
                    'count_over_time(dora_pipe_policy_version{run="scraped"}[1m]) >= 2'
                )
                cluster.until(lambda: cluster.version >= 4)
                prometheus.until("dora_pipe_policy_version >= 4")
                prometheus.until("changes(dora_pipe_policy_version[1m]) > 0")
                yield prometheus


class _Following:
    def __init__(self, exporter: Exporter, cluster: Cluster, folder: Path) -> None:
        self._stopped = threading.Event()
        log = folder / "run" / "log.sqlite"
        topics, clock = cluster.topics, SystemClock()

        def follow() -> None:
            bus = SqliteBus(log)
            exporter.follow(bus, topics, clock, self._stopped.is_set)
            bus.close()

        self._thread = threading.Thread(target=follow)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()


@pytest.mark.parametrize(("dashboard", "title", "text"), QUERIES, ids=lambda value: str(value)[:60])
def test_every_query_of_every_dashboard_returns_data(
    prometheus: Prometheus, dashboard: str, title: str, text: str
) -> None:
    expr = text.replace("$run", ".*").replace("$__rate_interval", INTERVAL)
    samples = prometheus.query(expr)
    assert samples, f"{dashboard}, {title}: no data for {expr}"
    values = [float(sample["value"][1]) for sample in samples]
    assert any(value == value for value in values), f"{dashboard}, {title}: only NaN for {expr}"


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_can_be_evaluated_and_what_it_asks_for_is_there(
    prometheus: Prometheus, rule: dict[str, str]
) -> None:
    prometheus.query(rule["expr"])
    loaded = {
        row["name"]: row for group in prometheus.ask("rules")["groups"] for row in group["rules"]
    }
    assert not loaded[rule["alert"]].get("lastError"), loaded[rule["alert"]]


def test_no_alert_of_broken_promises_fires_on_a_sound_run(prometheus: Prometheus) -> None:
    firing = {row["labels"]["alertname"] for row in prometheus.ask("alerts")["alerts"]}
    assert not firing & {"StalenessOverBound", "UnreadableRecords", "LogUnavailable"}


def test_scrape_is_taken_whole(prometheus: Prometheus) -> None:
    assert [sample["value"][1] for sample in prometheus.query('up{job="dora-pipe"}')] == ["1"]
    (scraped,) = prometheus.query("scrape_samples_scraped")
    (kept,) = prometheus.query("scrape_samples_post_metric_relabeling")
    assert scraped["value"][1] == kept["value"][1]
