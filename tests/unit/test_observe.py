"""Tests of dashboards, alerts and Prometheus' configuration."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from dora_pipe.observe.metrics.table import METRICS
from tests.support.prometheus import DASHBOARDS, OBSERVE, missing

COLUMNS = 24
"""Width of Grafana's grid."""

HEIGHT = 8
"""Height of a panel in grid units."""

METRIC = re.compile(r"dora_pipe_[a-z_]+")
NAMES = {
    name
    for metric in METRICS
    for name in (
        [f"{metric.full}_{end}" for end in ("bucket", "sum", "count")]
        if metric.kind == "histogram"
        else [metric.full]
    )
}
RULES = [
    rule
    for group in yaml.safe_load((OBSERVE / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda path: path.name)
def test_panels_lie_side_by_side_and_ask_for_metrics_that_there_are(dashboard: Path) -> None:
    plain = json.loads(dashboard.read_text())
    assert plain["uid"] == f"dora-pipe-{dashboard.stem}" and plain["panels"]
    cells: set[tuple[int, int]] = set()
    for panel in plain["panels"]:
        location = panel["gridPos"]
        own = {(x, location["y"]) for x in range(location["x"], location["x"] + location["w"])}
        assert location["h"] == HEIGHT and max(own)[0] < COLUMNS
        assert not own & cells, panel["title"]
        cells |= own
        assert panel["description"].endswith("."), panel["title"]
        for target in panel["targets"]:
            named = set(METRIC.findall(target["expr"]))
            assert named and named <= NAMES, target["expr"]
            assert target["expr"].count('{run=~"$run"') == len(METRIC.findall(target["expr"]))


def test_alerts_ask_for_metrics_that_there_are_and_say_what_to_do() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert set(METRIC.findall(rule["expr"])) <= NAMES, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warn")
        assert rule["annotations"].keys() == {"summary", "action"}


def test_prometheus_own_tool_takes_rules_and_configuration() -> None:
    if missing():
        pytest.skip(missing())
    for words in (("rules", "alerts.yml"), ("config", "prometheus.yml")):
        done = subprocess.run(
            ["promtool", "check", words[0], words[1]],
            cwd=OBSERVE,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
