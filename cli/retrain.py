"""`retrain`: repeat steps of a run with a change; print a table of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.analysis.change import Change, read_rewards
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.analysis.retrain import RetrainedStep, retrain
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.config.load import plain_overrides
from dora_pipe.consumers.learners.registry import end_ranks
from dora_pipe.core.system.console import say
from dora_pipe.launch.run_dir import OpenRun

METRICS: Final = ("loss", "kl", "ratio_mean", "clipped_share", "grad_norm", "reward_mean")


def change_of(settings: Sequence[str], rewards: Path | None, drop: Sequence[str]) -> Change:
    """Return the change that the options describe. Raises UsageError, ConfigError."""
    return Change(
        settings=plain_overrides(settings),
        rewards={} if rewards is None else read_rewards(rewards),
        drop=frozenset(drop),
    )


def retrain_run(
    run: OpenRun,
    first: int | None,
    end: int | None,
    change: Change,
    out: Path,
    *,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Repeat the steps, write the directory and print them. Raises as `retrain`."""
    source = SourceRun.of(run)
    steps = source.steps(first, end)

    def report_step(step: int) -> None:
        report(f"step {step + 1}", max(0, step + 1 - steps.start), len(steps))

    report("reading the log")
    try:
        done = retrain(source, steps, change, out, report=report_step)
    finally:
        end_ranks()
    _print(done, out, as_json=as_json)


def _print(done: Sequence[RetrainedStep], out: Path, *, as_json: bool) -> None:
    if as_json:
        for step in done:
            emit_json(msgspec.to_builtins(step))
        return
    emit_table(
        ("step", *METRICS, "weights"),
        [
            (
                step.step,
                *(step.metrics.get(name) for name in METRICS),
                "equal" if step.equal else step.digest[:12],
            )
            for step in done
        ],
    )
    other = next((step.step for step in done if not step.equal), None)
    if other is None:
        emit_line("every step gave the weights of the source")
    else:
        emit_line(f"first step with other weights than the source's: {other}")
    say(f"wrote version {done[-1].step + 1} to {out}")
