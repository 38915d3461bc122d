"""Grafana's dashboards as code: one table of panels, from which the JSON files are written.

    python -m infra.observe.dashboards

writes infra/observe/dashboards/*.json; a test compares them with what it would write, and another
one asks a real Prometheus every query. It decides which questions a dashboard answers; what each
query's metrics mean is in docs/reference/metrics.md.
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


REWARD: Final = panel(
    "Reward",
    "Mean valid reward of each step's batch and of its tasks, and of the newest complete "
    "evaluations; pass@k and maj@k.",
    ("dora_pipe_step_reward{RUN}", "{{run}} batch"),
    ("dora_pipe_step_task_reward{RUN}", "{{run}} {{task}} batch"),
    ("dora_pipe_evaluation_reward{RUN}", "{{run}} {{evaluation}} evaluation"),
    (
        'dora_pipe_evaluation_figure{RUN,figure=~"(pass|maj)@.*"}',
        "{{run}} {{evaluation}} {{figure}}",
    ),
)

STALENESS: Final = panel(
    "Staleness of trained groups",
    "Mean over the last five minutes and over the whole run, beside the bound.",
    (lately("staleness_steps"), "{{run}} mean of 5 min"),
    (mean("staleness_steps"), "{{run}} mean of the run"),
    ("dora_pipe_staleness_bound_steps{RUN}", "{{run}} bound"),
)

WAITS: Final = panel(
    "Who stands still",
    "How long each role has stood still, what for, and what that ends with; 0: it works.",
    ("dora_pipe_role_wait_seconds{RUN}", "{{role}}: {{wait}} <- {{blocker}}"),
    unit="s",
)

OVERVIEW: Final = Dashboard(
    name="overview",
    title="pipeline overview",
    panels=(
        stat("Version", "Committed steps.", "dora_pipe_policy_version{RUN}"),
        stat("Planned", "Steps as configured.", "dora_pipe_planned_steps{RUN}"),
        stat("Over", "1 once the run has stopped.", "dora_pipe_run_over{RUN}"),
        stat("Step", "Mean of the whole run.", mean("step_seconds"), "s"),
        stat("Tokens/s", "Sampled now, all workers.", rate("sampled_tokens_total")),
        stat("Alarms", "Waits beyond their limit.", "sum(dora_pipe_role_overdue_waits{RUN})"),
        REWARD,
        STALENESS,
        panel(
            "Workers by version",
            "Those that are there, by the version they host.",
            (
                'sum by (version) (dora_pipe_workers{RUN,state!~"left|fenced"} > 0)',
                "version {{version}}",
            ),
            stacked=True,
        ),
        WAITS,
        panel(
            "Where a step's time goes",
            "The trainer waited for its batch, and trained, per step.",
            (lately("trainer_wait_seconds"), "{{run}} waited"),
            (lately("step_training_seconds"), "{{run}} trained"),
            unit="s",
            stacked=True,
        ),
        panel(
            "Fates",
            "Groups that ended, per second.",
            (rate("groups_ended_total", by="fate"), "{{fate}}"),
            unit="ops",
            stacked=True,
        ),
    ),
)

VERSIONS: Final = Dashboard(
    name="staleness",
    title="staleness and versions",
    panels=(
        STALENESS,
        panel(
            "Staleness, every group",
            "Groups per staleness over time.",
            (buckets("staleness_steps"), "{{le}}"),
            kind="heatmap",
        ),
        stat("Bound", "max_staleness in force.", "dora_pipe_staleness_bound_steps{RUN}"),
        stat(
            "Beyond it",
            "Groups trained behind their deadline; none in a sound run.",
            "dora_pipe_groups_beyond_bound_total{RUN}",
        ),
        stat("90 % below", "Staleness, whole run.", quantile(0.9, "staleness_steps")),
        panel(
            "Version of each worker",
            "Which version every worker hosts.",
            ("dora_pipe_worker_version{RUN}", "{{worker}}"),
            kind="state-timeline",
        ),
        panel(
            "Workers by version and state",
            "Of those that are there.",
            (
                'sum by (version, state) (dora_pipe_workers{RUN,state!~"left|fenced"} > 0)',
                "version {{version}} {{state}}",
            ),
            stacked=True,
        ),
        panel(
            "Open groups",
            "Dispatched and not ended, beside requests without a place.",
            ("dora_pipe_open_groups{RUN}", "{{run}} {{purpose}}"),
            ("dora_pipe_queued_requests{RUN}", "{{run}} queued requests"),
        ),
        panel(
            "Mismatch by staleness",
            "Mean |ln ratio| of the newest step's trajectories, trained policy to sampler.",
            ("dora_pipe_step_logprob_mismatch{RUN}", "{{run}} staleness {{staleness}}"),
        ),
        panel(
            "Loading weights",
            "From an assignment to loaded and checked weights.",
            (quantile(0.5, "weights_load_seconds"), "{{run}} half below"),
            (quantile(0.95, "weights_load_seconds"), "{{run}} 95 % below"),
            unit="s",
        ),
    ),
)

TRAINER: Final = Dashboard(
    name="trainer",
    title="trainer",
    panels=(
        stat("Steps", "Committed.", "dora_pipe_steps_total{RUN}"),
        stat("Waited", "Mean per step, whole run.", mean("trainer_wait_seconds"), "s"),
        stat("Trained", "Mean per step, whole run.", mean("step_training_seconds"), "s"),
        stat("Refused", "Batches.", "dora_pipe_batches_refused_total{RUN}"),
        stat("Batch", "Sampled tokens of the newest.", "dora_pipe_step_tokens{RUN}"),
        stat(
            "Effective sample",
            "Share of the batch's trajectories that weigh.",
            "dora_pipe_step_effective_sample_ratio{RUN}",
            "percentunit",
        ),
        panel(
            "Whom the trainer waited for",
            "Seconds per second, by the worker whose trajectory came last.",
            (rate("trainer_waited_seconds_total", by="worker"), "{{worker}}"),
            unit="percentunit",
            stacked=True,
        ),
        panel(
            "Phase",
            "What the trainer does.",
            ("dora_pipe_trainer_phase{RUN}", "{{phase}}"),
            kind="state-timeline",
        ),
        REWARD,
        panel(
            "Parts of rewards",
            "Means of the newest step's batch, before weights.",
            ("dora_pipe_step_reward_part{RUN}", "{{run}} {{task}} {{part}}"),
        ),
        panel("Loss", "Of the newest step.", figures("loss")),
        panel("Gradient norm", "Of the newest step.", figures("grad_norm", "grad_norm_max")),
        panel(
            "Ratios",
            "Trained policy to sampler, over the tokens of the newest step.",
            figures("ratio_mean", "ratio_min", "ratio_max"),
        ),
        panel(
            "Clipped share and KL",
            "Of the newest step; the KL to the reference, and to a teacher where there is one.",
            figures("clipped_share", "kl", "teacher_kl"),
        ),
        panel(
            "Read ahead",
            "Trajectories in the trainer's cache.",
            ("dora_pipe_trainer_cached_records{RUN}", "{{run}}"),
        ),
        panel(
            "Compute",
            "Share of the time in forward, backward and update.",
            (rate("trainer_compute_seconds_total"), "{{run}}"),
            unit="percentunit",
        ),
        panel(
            "Size of the cache",
            "Bytes of these records.",
            ("dora_pipe_trainer_cached_bytes{RUN}", "{{run}}"),
            unit="bytes",
        ),
    ),
)

WORKERS: Final = Dashboard(
    name="workers",
    title="workers",
    panels=(
        panel(
            "Tokens per second",
            "Sampled, by worker.",
            (rate("sampled_tokens_total", by="worker"), "{{worker}}"),
            stacked=True,
        ),
        panel(
            "Prompt tokens reused",
            "Of those of prompts, what was not computed: equal beginnings were kept.",
            (
                rate("prompt_tokens_total", ',how="reused"', by="worker")
                + " / "
                + rate("prompt_tokens_total", by="worker"),
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Slots in use",
            "Requests with a slot over slots.",
            (
                'dora_pipe_worker_requests{RUN,state="active"}'
                " / on (run, worker) dora_pipe_worker_slots{RUN}",
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Requests that wait for a slot",
            "Placed ahead, by worker.",
            ('dora_pipe_worker_requests{RUN,state="waiting"}', "{{worker}}"),
        ),
        panel(
            "With their agents",
            "Sessions whose agents think, and calls that have no answer yet.",
            ('dora_pipe_worker_requests{RUN,state="agent"}', "{{worker}} agents"),
            ("dora_pipe_worker_calls_open{RUN}", "{{worker}} calls"),
        ),
        panel(
            "Oldest open call",
            "Since it came.",
            ("dora_pipe_worker_call_open_seconds{RUN}", "{{worker}}"),
            unit="s",
        ),
        panel(
            "KV cache in use",
            "Tokens over what fits.",
            (
                "dora_pipe_worker_kv_used_tokens{RUN}"
                " / on (run, worker) dora_pipe_worker_kv_capacity_tokens{RUN}",
                "{{worker}}",
            ),
            unit="percentunit",
        ),
        panel(
            "Trajectories by how they ended",
            "Per second.",
            (rate("trajectories_total", by="finish, valid"), "{{finish}}, valid {{valid}}"),
            unit="ops",
            stacked=True,
        ),
        panel(
            "Trajectories without a valid reward",
            "Per second, by whose fault it is and class of error.",
            (rate("trajectories_invalid_total", by="fault, error"), "{{fault}}: {{error}}"),
            unit="ops",
            stacked=True,
        ),
        panel(
            "Length of trajectories",
            "Sampled tokens, over the whole run.",
            (quantile(0.5, "trajectory_tokens"), "{{run}} half below"),
            (quantile(0.95, "trajectory_tokens"), "{{run}} 95 % below"),
        ),
        panel(
            "Moves and lost workers",
            "Per second.",
            (rate("moves_total", by="stage"), "moves {{stage}}"),
            (rate("workers_lost_total", by="how"), "workers {{how}}"),
            unit="ops",
        ),
        panel(
            "How stays on workers ended",
            "Of groups that have ended, per second.",
            (rate("stays_ended_total", by="outcome"), "{{outcome}}"),
            unit="ops",
        ),
        WAITS,
        panel(
            "Memory",
            "Resident, by role.",
            ("dora_pipe_role_memory_bytes{RUN}", "{{role}}"),
            unit="bytes",
        ),
    ),
)

BUS: Final = Dashboard(
    name="bus",
    title="bus",
    panels=(
        panel(
            "Records per second",
            "By topic.",
            (rate("bus_records_total", by="topic"), "{{topic}}"),
            unit="ops",
        ),
        panel(
            "Bytes per second",
            "Of values, by topic.",
            (rate("bus_bytes_total", by="topic"), "{{topic}}"),
            unit="Bps",
        ),
        panel(
            "From a fact to the round that folds it",
            "Writing, the bus, reading.",
            (quantile(0.5, "control_delay_seconds"), "{{run}} half below"),
            (quantile(0.99, "control_delay_seconds"), "{{run}} 99 % below"),
            unit="s",
        ),
        panel(
            "The same over time",
            "Facts per delay.",
            (buckets("control_delay_seconds"), "{{le}}"),
            kind="heatmap",
            unit="s",
        ),
        panel(
            "Behind the end of the log",
            "Control positions that the orchestrator, and positions that these metrics lack.",
            ("dora_pipe_orchestrator_lag_positions{RUN}", "{{run}} orchestrator"),
            ("dora_pipe_exporter_lag_positions{RUN}", "metrics: {{topic}} {{partition}}"),
        ),
        panel(
            "CPU time on the bus",
            "Share of a core, by role.",
            (rate("role_cpu_seconds_total", ',part="bus"', by="role"), "{{role}}"),
            unit="percentunit",
        ),
        panel(
            "Rounds and decisions",
            "Per second.",
            (rate("rounds_total"), "{{run}} rounds"),
            (rate("decisions_total", by="kind"), "{{kind}}"),
            unit="ops",
        ),
        panel(
            "End of each partition",
            "Positions.",
            ("dora_pipe_bus_end_position{RUN}", "{{topic}} {{partition}}"),
        ),
        stat("Log", "1 while it can be read.", "dora_pipe_log_up{RUN}"),
        stat("Unreadable", "Records.", "sum(dora_pipe_bus_unreadable_records_total{RUN})"),
        stat(
            "Newest record",
            "Ago.",
            "time() - dora_pipe_last_record_timestamp_seconds{RUN}",
            "s",
        ),
    ),
)

DASHBOARDS: Final = (OVERVIEW, VERSIONS, TRAINER, WORKERS, BUS)


def main() -> None:
    """Write every file anew; files that no dashboard has are removed."""
    FOLDER.mkdir(exist_ok=True)
    wanted = {dashboard.path for dashboard in DASHBOARDS}
    for path in set(FOLDER.glob("*.json")) - wanted:
        path.unlink()
    for dashboard in DASHBOARDS:
        dashboard.path.write_text(dashboard.text())
        sys.stdout.write(f"{dashboard.path.name}: {len(dashboard.panels)} panels\n")


if __name__ == "__main__":
    main()
