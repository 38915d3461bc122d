"""`retrain`: repeat steps of a run with a change; print a table of steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from dora_pipe.analysis.change import Change, read_rewards
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.analysis.retrain import RetrainedStep
from dora_pipe.analysis.retrain import retrain as retrain_steps
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.cli.progress import opened_watched
from dora_pipe.config.load import plain_overrides
from dora_pipe.consumers.learners.registry import end_ranks
from dora_pipe.core.system.console import RUNS, say

METRICS: Final = ("loss", "kl", "ratio_mean", "clipped_share", "grad_norm", "reward_mean")


def change_of(settings: Sequence[str], rewards: Path | None, drop: Sequence[str]) -> Change:
    """Return the change that the options describe. Raises UsageError, ConfigError."""
    return Change(
        settings=plain_overrides(settings),
        rewards={} if rewards is None else read_rewards(rewards),
        drop=frozenset(drop),
    )


def retrain(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="New directory for the result.")],
    first: Annotated[
        int | None, typer.Option("--from", metavar="A", help="First step; default: 0.")
    ] = None,
    end: Annotated[
        int | None,
        typer.Option("--to", metavar="B", help="End step, exclusive; default: the last."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Changed setting; repeatable."),
    ] = None,
    rewards: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rewards to train with, from `rescore`.")
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option("--drop", metavar="ID", help="Group or trajectory to leave out; repeatable."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Repeat training steps of a run from its log, with other settings, rewards or rows.

    Writes the weights as a model directory, steps.jsonl and change.json.
    """
    change = change_of(settings or (), rewards, drop or ())
    with opened_watched(run, root) as (open_run, report):
        source = SourceRun.of(open_run)
        steps = source.steps(first, end)

        def report_step(step: int) -> None:
            report(f"step {step + 1}", max(0, step + 1 - steps.start), len(steps))

        report("reading the log")
        try:
            done = retrain_steps(source, steps, change, out, report=report_step)
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
