"""Dashboards of Grafana as values and as the JSON it reads; it decides where a panel stands."""

from __future__ import annotations

import json
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

RATE: Final = "[$__rate_interval]"

Kind = Literal["timeseries", "stat", "bargauge", "heatmap", "state-timeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A panel of a dashboard: `panel` makes one."""

    title: str
    says: str
    """What it shows, for people."""
    queries: tuple[tuple[str, str], ...]
    """What Prometheus is asked, variables of Grafana included, and the legends of the lines."""
    kind: Kind
    unit: str
    """Grafana's name of the unit."""
    width: int
    stacked: bool


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
            "expr": expression,
            "legendFormat": legend,
            "format": "heatmap" if panel.kind == "heatmap" else "time_series",
        }
        for index, (expression, legend) in enumerate(panel.queries)
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


# The panels.


def panel(
    title: str,
    says: str,
    *queries: tuple[str, str] | str,
    unit: str = "short",
    kind: Kind = "timeseries",
    width: int = 12,
    stacked: bool = False,
) -> Panel:
    """A panel; a query is an expression, or (expression, legend). `RUN` is the choice of runs."""
    named = [(one, "{{run}}") if isinstance(one, str) else one for one in queries]
    return Panel(
        title=title,
        says=says,
        queries=tuple((one.replace("{RUN", '{run=~"$run"'), legend) for one, legend in named),
        unit=unit,
        kind=kind,
        width=width,
        stacked=stacked,
    )


def stat(title: str, says: str, expr: str, unit: str = "short") -> Panel:
    """A number."""
    return panel(title, says, expr, unit=unit, kind="stat", width=4)


def rate(metric: str, labels: str = "", by: str = "run") -> str:
    """Per second, added up."""
    return f"sum by ({by}) (rate(dora_pipe_{metric}{{RUN{labels}}}{RATE}))"


def mean(metric: str) -> str:
    """Mean observation of a histogram, over the whole run."""
    return f"dora_pipe_{metric}_sum{{RUN}} / dora_pipe_{metric}_count{{RUN}}"


def lately(metric: str) -> str:
    """Mean observation of a histogram within five minutes."""
    summed = f"increase(dora_pipe_{metric}_sum{{RUN}}[5m])"
    return f"{summed} / (increase(dora_pipe_{metric}_count{{RUN}}[5m]) > 0)"


def share_ahead() -> str:
    """Of all training what was done before the batch was whole."""
    ahead = rate("trainer_ahead_seconds_total")
    return f"{ahead} / ({ahead} + {rate('step_training_seconds_sum')} > 0)"


def quantile(share: float, metric: str) -> str:
    """A quantile over the whole run: what was rare stays in sight."""
    return f"histogram_quantile({share}, dora_pipe_{metric}_bucket{{RUN}})"


def buckets(metric: str) -> str:
    """Observations per bucket, for a heat map."""
    return f"sum by (le) (increase(dora_pipe_{metric}_bucket{{RUN}}{RATE}))"


def figures(*names: str) -> tuple[str, str]:
    """Figures of the newest commit."""
    chosen = "|".join(names)
    return f'dora_pipe_step_figure{{RUN,figure=~"{chosen}"}}', "{{run}} {{figure}}"
