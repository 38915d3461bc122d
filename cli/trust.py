"""Commands that reproduce a run, and hand it on: `replay`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import say
from dora_pipe.cli.replay_lines import rebuilder, replay_steps, replay_trajectories
from dora_pipe.cli.rundir import RUNS, opened
from dora_pipe.cli.traces import export_traces
from dora_pipe.errors import UsageError
from dora_pipe.history.export import export_parquet, export_policy
from dora_pipe.policies.model_dir import refuse_used


def export(
    run: RunArgument,
    directory: Annotated[
        Path | None, typer.Argument(metavar="[DIR]", help="Where --policy goes.")
    ] = None,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trajectories, one row each.")
    ] = None,
    policy: Annotated[
        int | None, typer.Option(metavar="N", help="Version N as a model directory.")
    ] = None,
    traces: Annotated[
        str,
        typer.Option(metavar="FILE|URL", help="OpenTelemetry traces: OTLP, JSON lines or HTTP."),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", help="With --traces URL: go on until the run is over.")
    ] = False,
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="With --traces: a share of the groups.")
    ] = 1.0,
    everything: Annotated[
        bool, typer.Option("--all", help="Also records that do not count for their group.")
    ] = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Hand a run to other tools: `--parquet FILE`, `--policy N DIR` for `from_pretrained`, or
    `--traces FILE|URL`."""
    if [parquet is not None, policy is not None, bool(traces)].count(True) != 1:
        raise UsageError("say what to export: --parquet FILE, --policy N DIR, or --traces FILE|URL")
    with opened(run, root, archive) as open_run:
        if traces:
            export_traces(open_run, traces, follow=follow, ratio=ratio)
        elif parquet is not None:
            store = open_run.policies if open_run.has_policies else None
            done = export_parquet(
                open_run.bus, open_run.topics, store, parquet, everything=everything
            )
            left = f", {done.left_out} records left out" if done.left_out else ""
            say(f"{parquet}: {done.rows} trajectories, {done.bytes / 1e6:.1f} MB{left}")
        elif policy is not None:
            if directory is None:
                raise UsageError("--policy needs a directory: export RUN --policy N DIR")
            refuse_used(directory)
            rebuilder(open_run).weights(policy)
            digest = export_policy(
                open_run.bus, open_run.topics, open_run.policies, policy, directory
            )
            say(f"{directory}: version {policy}, weights {digest}")


def replay(
    run: RunArgument,
    first: Annotated[
        int | None, typer.Option("--from", metavar="A", help="The first step; default 0.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--to", metavar="B", help="The first step left out; default the end."),
    ] = None,
    trajectory: Annotated[
        list[str] | None,
        typer.Option("--trajectory", metavar="ID", help="Generate this one again instead."),
    ] = None,
    random: Annotated[
        int, typer.Option("--random", metavar="N", help="Generate N random trajectories again.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Chooses the random ones.")] = 0,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Train with another setting."),
    ] = None,
    as_json: JsonOption = False,
    archive: ArchiveOption = None,
    root: RunsOption = RUNS,
) -> None:
    """Train steps A to B-1 again, or generate trajectories again; exit code 6 if bits differ."""
    with opened(run, root, archive) as open_run:
        if trajectory or random:
            if first is not None or last is not None or changes:
                raise UsageError("--trajectory and --random generate again; --from trains again")
            replay_trajectories(open_run, trajectory or (), random, seed, as_json=as_json)
        else:
            replay_steps(open_run, first, last, changes or (), as_json=as_json)
