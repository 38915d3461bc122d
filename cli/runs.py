"""Rows of all runs in a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_pipe.core.errors import DoraError
from dora_pipe.launch.run_dir import OpenRun, RunDir, opened
from dora_pipe.observe.run_stats import RunStats


def run_rows(root: Path) -> list[dict[str, Any]]:
    """Return a row per run; unreadable runs give the reason."""
    rows = []
    for path in sorted(root.glob("*/config.toml")):
        try:
            with opened(RunDir(path.parent).words) as run:
                rows.append(_run_row(run))
        except DoraError as error:
            rows.append({"run": path.parent.name, "state": f"unreadable: {error.message}"})
    return rows


def _run_row(run: OpenRun) -> dict[str, Any]:
    stats = RunStats(run.topics.run)
    stats.read(run.bus, run.topics, statuses=False)
    return {
        "run": run.config.run.name,
        "steps": stats.version,
        "reward": stats.steps[-1].reward if stats.steps else None,
        "of": run.config.run.steps,
        "task": ", ".join(task.name or task.kind for task in run.config.tasks),
        "log": run.directory.bus_url(run.config),
        "state": stats.state,
    }
