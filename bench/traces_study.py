"""`bench traces`: the same short run with and without traces, in turns, and what they cost it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path

from dora_pipe.bench.paradigms_study import run_whole, warm_start
from dora_pipe.bench.traces import (
    Cost,
    Endpoint,
    TracedRun,
    Traces,
    measure,
)
from dora_pipe.cli.output import emit_json, emit_line, emit_rows
from dora_pipe.config.load import load_config
from dora_pipe.launch.plan import plan_new
from dora_pipe.launch.run_dir import opened


def setting_of(config: Path | None, place: Path) -> tuple[Path, list[str]]:
    """The configuration, and what every run of it has in common."""
    if config is not None:
        return config, []
    demo = warm_start(place)
    return demo, [f'model.path="{place / "start" / "warm"}"', "evaluation.prompts=0"]


def run_one(
    config: Path, place: Path, round_: int, kind: Traces, common: Sequence[str], ratio: float
) -> TracedRun:
    """One run and its figures."""
    with Endpoint() if kind == "on" else nullcontext() as endpoint:
        own = [f'run.name="{kind}-{round_}"', "telemetry.traces=off"]
        if endpoint is not None:
            own[1:] = [f"telemetry.traces={endpoint.address}", f"telemetry.traces_ratio={ratio}"]
        plan = plan_new(load_config(config, [*common, *own]), place)
        run_whole(plan)
    with opened(str(plan.directory.path)) as run:
        return measure(
            run.bus,
            run.topics,
            round_=round_,
            traces=kind,
            requests=0 if endpoint is None else endpoint.requests,
            sent_bytes=0 if endpoint is None else endpoint.bytes,
        )


def line_of(run: TracedRun) -> str:
    """A run in one line."""
    return (
        f"round {run.round}, traces {run.traces}: "
        f"{run.sampled_tokens_per_s:,.0f} tokens/s sampled, "
        f"{run.trained_trajectories_per_s:.1f} trajectories/s trained, {run.seconds:.1f} s, "
        f"{run.megabytes:.2f} MB of traces"
    )


def print_traces(
    setting: str, runs: Sequence[TracedRun], found: Sequence[Cost], *, as_json: bool
) -> None:
    """Every run, and what traces cost."""
    if as_json:
        emit_json({"setting": setting})
    else:
        emit_line(setting)
    emit_rows([one.name for one in fields(TracedRun)], map(asdict, runs), as_json=as_json)
    emit_rows([one.name for one in fields(Cost)], map(asdict, found), as_json=as_json)
