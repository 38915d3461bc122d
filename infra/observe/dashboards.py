"""Grafana's dashboards as code: one table of panels, from which the JSON files are written.

    python -m infra.observe.dashboards

writes infra/observe/dashboards/*.json; a test compares them with what it would write, and another
one asks a real Prometheus every query. It decides what is worth a panel.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

FOLDER: Final = Path(__file__).parent / "dashboards"

SCHEMA: Final = 39
"""Version of Grafana's dashboard format: Grafana 10.4 and later read it."""

COLUMNS: Final = 24
"""Of Grafana's grid."""

HEIGHT: Final = 8
"""Rows of a panel, in units of the grid."""

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}

Kind = Literal["timeseries", "stat", "bargauge", "heatmap", "state-timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One line of a panel. `RUN` in the expression is the choice of runs."""

    expr: str
    legend: str = "{{run}}"

    @property
    def text(self) -> str:
        """As Prometheus is asked, variables of Grafana included."""
        return self.expr.replace("{RUN", '{run=~"$run"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of a dashboard."""

    title: str
    says: str
    """What it shows, for people."""
    queries: tuple[Query, ...]
    kind: Kind = "timeseries"
    unit: str = "short"
    """Grafana's name of the unit."""
    width: int = 12
    stacked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of panels, filled from left to right."""

    name: str
    title: str
    panels: tuple[Panel, ...]

    @property
    def path(self) -> Path:
        """The file that is committed."""
        return FOLDER / f"{self.name}.json"

    def text(self) -> str:
        """The file's content."""
        return json.dumps(_plain(self), indent=2, ensure_ascii=False) + "\n"


def _plain(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": f"dora-pipe-{dashboard.name}",
        "title": f"dora-pipe: {dashboard.title}",
        "tags": ["dora-pipe"],
        "schemaVersion": SCHEMA,
        "editable": False,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [
            {
                "type": "dashboards",
                "title": "dora-pipe",
                "tags": ["dora-pipe"],
                "asDropdown": True,
                "keepTime": True,
                "includeVars": True,
            }
        ],
        "templating": {"list": [_datasource_variable(), _run_variable()]},
        "panels": _placed(dashboard.panels),
    }


def _datasource_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "source", "type": "datasource", "query": "prometheus"}


def _run_variable() -> dict[str, Any]:
    return {
        "name": "run",
        "label": "run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(dora_pipe_log_up, run)", "refId": "runs"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    """Panels with their places on the grid."""
    found, x, y = [], 0, 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > COLUMNS:
            x, y = 0, y + HEIGHT
        found.append(_panel(number, panel, {"x": x, "y": y, "w": panel.width, "h": HEIGHT}))
        x += panel.width
    return found


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    targets = [
        {
            "refId": chr(ord("A") + index),
            "datasource": DATASOURCE,
            "expr": query.text,
            "legendFormat": query.legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, query in enumerate(panel.queries)
    ]
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.says,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": targets,
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "timeseries":
        # Points and dashes beside colours: a print in black and white can be read.
        found["custom"] = {
            "lineWidth": 2,
            "showPoints": "auto",
            "fillOpacity": 30 if panel.stacked else 0,
            "stacking": {"mode": "normal" if panel.stacked else "none"},
        }
    return found


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case "timeseries":
            return {"legend": {"displayMode": "table", "placement": "bottom", "calcs": ["last"]}}
        case "heatmap":
            return {"calculate": False, "yAxis": {"unit": panel.unit}}
        case "stat" | "bargauge":
            return {"reduceOptions": {"calcs": ["lastNotNull"]}}
        case "state-timeline":
            return {"mergeValues": True, "showValue": "auto"}


def main() -> None:
    """Write every file anew; files that no dashboard has are removed."""
    from infra.observe.panels import DASHBOARDS

    FOLDER.mkdir(exist_ok=True)
    wanted = {dashboard.path for dashboard in DASHBOARDS}
    for path in set(FOLDER.glob("*.json")) - wanted:
        path.unlink()
    for dashboard in DASHBOARDS:
        dashboard.path.write_text(dashboard.text())
        sys.stdout.write(f"{dashboard.path.name}: {len(dashboard.panels)} panels\n")


if __name__ == "__main__":
    main()
