"""Commands that repeat or score a logged run with one change."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.progress import watched
from dora_pipe.core.system.console import RUNS

EVAL = "eval"

ProbeOption = Annotated[
    str,
    typer.Option(
        metavar="PROBE",
        help="An evaluation of the run (eval or eval:NAME), or a module:function that maps a "
        "checkpoint folder to one number or a number per row.",
    ),
]
DropRowsOption = Annotated[
    list[str] | None,
    typer.Option("--drop", metavar="ID", help="Group or trajectory to leave out; repeatable."),
]
SettingsOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Changed setting; repeatable."),
]
RewardsOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Rewards to train with, from `rescore`.")
]


def bisect(
    run: RunArgument,
    good: Annotated[int, typer.Option(min=0, metavar="VERSION", help="A good version.")],
    bad: Annotated[int, typer.Option(min=1, metavar="VERSION", help="A later, bad version.")],
    probe: ProbeOption = EVAL,
    steps: Annotated[int, typer.Option(min=0, help="Maximum repeated steps of all trials.")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="Draws per version.")] = 512,
    directory: Annotated[Path | None, typer.Option(help="Import directory of the probe.")] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Find the step that made a run bad, and the group whose removal fixes it.

    Prints changed settings before the search.
    """
    from dora_pipe.analysis.bisect import Limits
    from dora_pipe.cli.bisect import bisect_run
    from dora_pipe.launch.run_dir import opened

    limits = Limits(draws=draws, steps=steps)
    with opened(run, root) as opened_run, watched(opened_run) as (open_run, report):
        bisect_run(
            open_run,
            good,
            bad,
            probe,
            directory=directory,
            limits=limits,
            as_json=as_json,
            report=report,
        )


def diff(
    run: RunArgument,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The other run.")],
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Find the first record in which two runs differ, and the cause: changed settings, keys,
    seeds, versions or code.
    """
    from dora_pipe.cli.diff import print_diff
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as first, opened(other, root) as two:
        print_diff(first, two, as_json=as_json)


def fork(
    run: RunArgument,
    trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="Trajectory id.")],
    turn: Annotated[
        int | None, typer.Option(help="Continue from this turn; default: every turn.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Continuations from each turn.")] = 16,
    version: Annotated[
        int | None, typer.Option(help="Version that continues; default: the trajectory's own.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Continue a trajectory from its turns with new seeds and compare the rewards: they show which
    turn decided the episode.
    """
    from dora_pipe.cli.fork import fork_trajectory
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (open_run, report):
        fork_trajectory(
            open_run,
            trajectory,
            turn=turn,
            samples=samples,
            version=version,
            as_json=as_json,
            report=report,
        )


def rescore(
    run: RunArgument,
    reward: Annotated[
        list[str] | None,
        typer.Option(
            "--reward",
            metavar="USE",
            help="Reward of every task: module:function, a built-in one, or a value of "
            "`task.reward`; NAME=USE sets one task. Default: the run's reward, with local code.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Import directory; default: the run's.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Score all logged texts with another reward and report outcomes and advantage signs that
    differ. Without --reward, check the run's own rewards; exit code 6 if they differ.
    """
    from dora_pipe.cli.rescore import rescore_run
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (open_run, report):
        rescore_run(open_run, reward or (), directory=directory, as_json=as_json, report=report)


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
    settings: SettingsOption = None,
    rewards: RewardsOption = None,
    drop: DropRowsOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Repeat training steps of a run from its log, with other settings, rewards or rows.

    Writes the weights as a model directory, steps.jsonl and change.json.
    """
    from dora_pipe.cli.retrain import change_of, retrain_run
    from dora_pipe.launch.run_dir import opened

    change = change_of(settings or (), rewards, drop or ())
    with opened(run, root) as opened_run, watched(opened_run) as (open_run, report):
        retrain_run(open_run, first, end, change, out, as_json=as_json, report=report)
