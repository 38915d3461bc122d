"""Commands that reproduce a run, and hand it on: `replay`, `export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import say
from dora_pipe.cli.replay_lines import rebuilder, replay_steps, replay_trajectories
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.cli.traces import export_traces
from dora_pipe.cli.trackers import export_tensorboard, export_wandb
from dora_pipe.errors import UsageError
from dora_pipe.history.export import export_parquet, export_policy
from dora_pipe.policies.model_dir import refuse_used

_EXPORTS = (
    "--parquet FILE",
    "--policy N DIR",
    "--traces FILE|URL",
    "--tensorboard DIR",
    "--wandb PROJECT",
)
"""What can be exported: one of them at a time."""


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
    tensorboard: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Figures per step as TensorBoard's files.")
    ] = None,
    wandb: Annotated[
        str, typer.Option(metavar="PROJECT", help="Figures per step for W&B, offline by default.")
    ] = "",
    follow: Annotated[
        bool,
        typer.Option(
            "--follow",
            help="With --traces URL, --tensorboard, --wandb: go on until the run is over.",
        ),
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
    """Hand a run to other tools: `--parquet FILE`, `--policy N DIR` for `from_pretrained`,
    `--traces FILE|URL`, `--tensorboard DIR` or `--wandb PROJECT`."""
    wanted = (parquet is not None, policy is not None, traces, tensorboard is not None, wandb)
    if sum(map(bool, wanted)) != 1:
        raise UsageError(f"say what to export: {', '.join(_EXPORTS[:-1])}, or {_EXPORTS[-1]}")
    with opened(run, root, archive) as open_run:
        if traces:
            export_traces(open_run, traces, follow=follow, ratio=ratio)
        elif tensorboard is not None:
            export_tensorboard(open_run, tensorboard, follow=follow)
        elif wandb:
            export_wandb(open_run, wandb, follow=follow)
        elif parquet is not None:
            _export_parquet(open_run, parquet, everything=everything)
        elif policy is not None:
            _export_policy(open_run, policy, directory)


def _export_parquet(run: OpenRun, parquet: Path, *, everything: bool) -> None:
    store = run.policies if run.has_policies else None
    done = export_parquet(run.bus, run.topics, store, parquet, everything=everything)
    left = f", {done.left_out} records left out" if done.left_out else ""
    say(f"{parquet}: {done.rows} trajectories, {done.bytes / 1e6:.1f} MB{left}")


def _export_policy(run: OpenRun, policy: int, directory: Path | None) -> None:
    if directory is None:
        raise UsageError("--policy needs a directory: export RUN --policy N DIR")
    refuse_used(directory)
    rebuilder(run).weights(policy)
    digest = export_policy(run.bus, run.topics, run.policies, policy, directory)
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
