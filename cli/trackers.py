"""Figures of a run for experiment trackers: `export --tensorboard` and `export --wandb`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dora_pipe.cli.metrics import contributions_of
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.trackers.follow import Tracking
from dora_pipe.observe.trackers.port import Tracker
from dora_pipe.observe.trackers.tensorboard import TensorBoardTracker
from dora_pipe.observe.trackers.wandb import WandbTracker


def export_tensorboard(run: OpenRun, folder: Path, *, follow: bool) -> None:
    """Write event files of a run below a folder; `follow` waits for more."""
    _export(run, lambda: TensorBoardTracker(folder), str(folder / run.topics.run), follow=follow)


def export_wandb(run: OpenRun, project: str, *, follow: bool) -> None:
    """Give a run to a project of W&B, offline unless the environment says otherwise."""
    _export(run, lambda: WandbTracker(project), f"W&B project {project}", follow=follow)


def _export(run: OpenRun, make: Callable[[], Tracker], target: str, *, follow: bool) -> None:
    tracker = make()
    try:
        rows = contributions_of(run)
        tracking = Tracking(run.bus, run.topics, tracker, rows, SystemClock())
        done = tracking.follow() if follow else tracking.whole()
    finally:
        tracker.close()
    there = f", {done.before} were there" if done.before else ""
    goes_on = "" if done.over else "; the run goes on, and so does the same command"
    say(f"{target}: {done.rows} rows{there}{goes_on}")
