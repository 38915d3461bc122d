"""`bench traces`: the same short run with and without traces, in turns, and what they cost it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.bench.traces import (
    LOST_MAX,
    STILL,
    Cost,
    Endpoint,
    TracedRun,
    Traces,
    costs,
    measure,
    order,
)
from dora_pipe.cli.output import emit_json, emit_rows, say
from dora_pipe.cli.paradigms import bench_place, run_whole, warm_start
from dora_pipe.cli.rundir import opened
from dora_pipe.cli.start import plan_new
from dora_pipe.config.load import load_config


def traces(
    config: Annotated[
        Path | None, typer.Argument(help="A TOML file; without one, the demo's task.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Each is a run without and one with.")] = 5,
    steps: Annotated[int, typer.Option(min=3, help="Of every run.")] = 24,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="telemetry.traces_ratio of the runs with.")
    ] = 0.1,
    override: Annotated[
        list[str] | None, typer.Option("-o", "--override", help="key=value of every run.")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Where the runs go and stay.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Train with traces on and off, in turns on this machine, and compare the throughput."""
    runs: list[TracedRun] = []
    with bench_place(keep) as place:
        chosen, common = _setting(config, place)
        common += [f"run.steps={steps}", STILL, *(override or ())]
        for round_ in range(rounds):
            for kind in order(round_):
                runs.append(_run(chosen, place, round_, kind, common, ratio))
                say(_line(runs[-1]))
    setting = (
        f"{rounds} rounds of {steps} steps, traces_ratio {ratio:g}, {os.cpu_count()} cores; the "
        f"endpoint is a process of this machine; at most {100 * LOST_MAX:g} % may be lost"
    )
    _print(setting, runs, costs(runs), as_json=as_json)


def _setting(config: Path | None, place: Path) -> tuple[Path, list[str]]:
    """The configuration, and what every run of it has in common."""
    if config is not None:
        return config, []
    demo = warm_start(place)
    return demo, [f'model.path="{place / "start" / "warm"}"', "evaluation.prompts=0"]


def _run(
    config: Path, place: Path, round_: int, kind: Traces, common: Sequence[str], ratio: float
) -> TracedRun:
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


def _line(run: TracedRun) -> str:
    return (
        f"round {run.round}, traces {run.traces}: "
        f"{run.sampled_tokens_per_s:,.0f} tokens/s sampled, "
        f"{run.trained_trajectories_per_s:.1f} trajectories/s trained, {run.seconds:.1f} s, "
        f"{run.megabytes:.2f} MB of traces"
    )


def _print(
    setting: str, runs: Sequence[TracedRun], found: Sequence[Cost], *, as_json: bool
) -> None:
    if as_json:
        emit_json({"setting": setting})
    else:
        typer.echo(setting)
    emit_rows([one.name for one in fields(TracedRun)], map(asdict, runs), as_json=as_json)
    emit_rows([one.name for one in fields(Cost)], map(asdict, found), as_json=as_json)
