"""Commands that write a run, or a part of it, for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.lazy import lazy_app
from dora_pipe.cli.options import ForceOption, RunArgument, RunsOption
from dora_pipe.cli.progress import watched
from dora_pipe.core.system.console import RUNS

FollowOption = Annotated[
    bool, typer.Option("--follow", help="Continue until the run is over or Ctrl-C.")
]


def parquet(
    run: RunArgument,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    everything: Annotated[
        bool, typer.Option("--all", help="Include records that do not count for their group.")
    ] = False,
    force: ForceOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write the trajectories of a run as Parquet, one per row."""
    from dora_pipe.cli.export import export_parquet_file
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (open_run, _):
        export_parquet_file(open_run, file, everything=everything, force=force)


def policy(
    run: RunArgument,
    version: Annotated[str, typer.Argument(help="A version's number, or `best`.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    statement: Annotated[
        bool, typer.Option("--statement", help="Also write an in-toto statement of its origin.")
    ] = False,
    force: ForceOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write a policy version as a folder for `from_pretrained` and vLLM."""
    from dora_pipe.cli.export import export_policy_dir
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (open_run, _):
        export_policy_dir(open_run, version, directory, force=force, statement=statement)


def traces(
    run: RunArgument,
    target: Annotated[
        str, typer.Argument(metavar="FILE|URL", help="JSON lines of OTLP, or an OTLP/HTTP address.")
    ],
    ratio: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the groups to export.")
    ] = 1.0,
    follow: FollowOption = False,
    force: ForceOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write or send the OpenTelemetry traces of a run."""
    from dora_pipe.cli.export import export_traces
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run:
        if follow:  # the sender reports its own waits
            export_traces(
                opened_run, target, follow=True, ratio=ratio, force=force, report=lambda _: None
            )
            return
        with watched(opened_run) as (open_run, report):
            export_traces(open_run, target, follow=False, ratio=ratio, force=force, report=report)


def tensorboard(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of event files.")],
    follow: FollowOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write the metrics of each step as TensorBoard event files."""
    from dora_pipe.cli.export import export_tensorboard
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as open_run:
        export_tensorboard(open_run, directory, follow=follow)


def wandb(
    run: RunArgument,
    project: Annotated[str, typer.Argument(help="A project of W&B.")],
    follow: FollowOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write the metrics of each step to W&B; offline unless WANDB_MODE=online."""
    from dora_pipe.cli.export import export_wandb
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as open_run:
        export_wandb(open_run, project, follow=follow)


export = lazy_app(
    {
        "Commands": {
            "parquet": (
                "cli.commands.export:parquet",
                "Trajectories, one per row.",
                "export parquet demo demo.parquet",
            ),
            "policy": (
                "cli.commands.export:policy",
                "A policy version as a model folder.",
                "export policy demo best model",
            ),
            "traces": (
                "cli.commands.export:traces",
                "OpenTelemetry traces.",
                "export traces demo http://127.0.0.1:4318 --follow",
            ),
            "tensorboard": (
                "cli.commands.export:tensorboard",
                "Metrics of each step for TensorBoard.",
                "export tensorboard demo events",
            ),
            "wandb": (
                "cli.commands.export:wandb",
                "Metrics of each step for W&B.",
                "export wandb demo my-project",
            ),
        }
    },
    name="export",
    help="Write a run, or a part of it, for other tools.",
)
