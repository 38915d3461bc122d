"""Commands that ask of a log what else would have come of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora_pipe.cli.lazy import EXIT_INTERRUPTED
from dora_pipe.cli.options import JsonOption, OverrideOption, RunArgument, RunsOption
from dora_pipe.cli.progress import watched
from dora_pipe.core.console import RUNS, say
from dora_pipe.core.errors import UsageError

BatchesOption = Annotated[
    str,
    typer.Option(
        metavar="KIND",
        help="kept: those of the source. again: taken anew from its groups, by the rewards and the "
        "rules of groups that count now.",
    ),
]
EVAL = "eval"
"""The probe where none is named."""

ProbeOption = Annotated[
    str,
    typer.Option(
        metavar="PROBE",
        help="eval or eval:NAME, an evaluation of the run; module:function, of the folder of "
        "a checkpoint: a number, or one for each of its rows.",
    ),
]
DropRowsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Groups and trajectories that do not count, a line each."),
]
WeightsOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Trajectories with a factor of their loss, a line each."),
]
EvalOption = Annotated[
    int | None,
    typer.Option(
        "--eval", min=1, metavar="N", help="Evaluate each last version by N draws of --probe."
    ),
]


def bisect(
    run: RunArgument,
    good: Annotated[int, typer.Option(min=0, metavar="VERSION", help="A version that is good.")],
    bad: Annotated[int, typer.Option(min=1, metavar="VERSION", help="A later one that is bad.")],
    probe: ProbeOption = EVAL,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps that may be trained again, in all trials.")
    ] = 20,
    suspects: Annotated[int, typer.Option(min=1, help="Groups that may have done it.")] = 16,
    before: Annotated[
        int, typer.Option(min=0, help="Steps before the one that is found, with suspects too.")
    ] = 2,
    after: Annotated[
        int, typer.Option(min=0, help="Steps after it that are trained again too.")
    ] = 1,
    draws: Annotated[int, typer.Option(min=1, help="Of the probe for a version, at first.")] = 256,
    draws_max: Annotated[
        int | None,
        typer.Option(min=1, help="Where an interval has not decided before; default: 2048."),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Where the probe's module is imported from; here.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Which step made a run bad, and which of its groups did it: versions between are evaluated,
    then steps trained again without suspects. The log stays as it is; the same command goes on."""
    from dora_pipe.audit.bisect import DRAWS_MAX, Limits
    from dora_pipe.cli.bisect import bisect_run
    from dora_pipe.launch.run_dir import opened

    most = max(draws, DRAWS_MAX) if draws_max is None else draws_max
    limits = Limits(
        draws=min(draws, most),
        draws_max=most,
        after=after,
        before=before,
        steps=steps,
        suspects=suspects,
    )
    with opened(run, root) as found, watched(found) as (open_run, report):
        bisect_run(
            open_run,
            good=good,
            bad=bad,
            probe=probe,
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
    """Find the first record where two runs part, and why: settings that changed in mid-run, keys,
    seeds, versions, code.

    Example: dora-pipe diff demo demo2
    """
    from dora_pipe.cli.diff import print_diff
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as one, opened(other, root) as two:
        print_diff(one, two, as_json=as_json)


def fork(
    run: RunArgument,
    trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="As `show` names it.")],
    turn: Annotated[int | None, typer.Option(help="Continue from this turn; default all.")] = None,
    at: Annotated[
        list[int] | None, typer.Option("--at", metavar="TOKEN", help="Cut after so many tokens.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Continuations from each place.")] = 16,
    version: Annotated[
        int | None, typer.Option(help="Version that continues; default the trajectory's own.")
    ] = None,
    replayable: Annotated[
        bool,
        typer.Option(
            "--replayable", help="Repeat the turns in an environment that does not declare it."
        ),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Continue a trajectory from its turns with new seeds and print the spread of rewards: which
    turn decided the episode.

    Example: dora-pipe fork demo g0000000042-003 --turn 2 --samples 64
    """
    from dora_pipe.cli.fork import fork_trajectory
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as found, watched(found) as (open_run, report):
        fork_trajectory(
            open_run,
            trajectory,
            turn=turn,
            tokens=at or (),
            samples=samples,
            version=version,
            replayable=replayable,
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
            help="module:function, a built-in reward, or the value of `task.rewards`, for every "
            "task; NAME=USE for one. Default: the run's own reward, as it is here.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option(help="Folder of the module; default the run's own.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Rewards file; default in the run.")
    ] = None,
    random: Annotated[
        int, typer.Option(min=0, metavar="N", help="Score N random groups only.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of --random.")] = 0,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Score all logged texts with another reward: which outcomes of groups and which advantage
    signs differ. Without --reward, check the run's own rewards; exit code 6 if they differ.

    Example: dora-pipe rescore demo --reward new:score --directory .
    """
    from dora_pipe.cli.options import may_write_file
    from dora_pipe.cli.rescore import rescore_run
    from dora_pipe.launch.run_dir import opened

    if out is not None:
        may_write_file(out)
    with opened(run, root) as found, watched(found) as (open_run, report):
        rescore_run(
            open_run,
            reward or (),
            directory=directory,
            out=out,
            groups=random,
            seed=seed,
            as_json=as_json,
            report=report,
        )


def retrain(
    run: RunArgument,
    name: Annotated[str, typer.Option("--name", metavar="NEW", help="Of the new run.")],
    first: Annotated[int, typer.Option("--from", metavar="A", help="The first step.")] = 0,
    end: Annotated[
        int | None,
        typer.Option("--to", metavar="B", help="The first step left out; default the end."),
    ] = None,
    override: OverrideOption = None,
    batches: BatchesOption = "kept",
    rescored: Annotated[
        str, typer.Option(metavar="ID", help="Rewards that `rescore` has found, by their folder.")
    ] = "",
    drop_rows: DropRowsOption = None,
    weights: WeightsOption = None,
    draws: EvalOption = None,
    probe: ProbeOption = EVAL,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Train steps A to B-1 of a run again from its trajectories, with other settings, rewards or
    rows: a run of its own, without a rollout. The same command goes on where it was."""
    from dora_pipe.cli.retrain import Setting, retrain_run
    from dora_pipe.cli.retrain_eval import Evaluation

    if probe != EVAL and draws is None:
        raise UsageError("--probe is of --eval N")
    setting = Setting(
        name=name,
        overrides=tuple(override or ()),
        batches=batches,
        rescored=rescored,
        drop=drop_rows,
        weights=weights,
    )
    evaluation = None if draws is None else Evaluation(draws=draws, probe=probe)
    if not retrain_run(
        run, setting, root=root, first=first, end=end, evaluation=evaluation, as_json=as_json
    ):
        say("stopped: the same command goes on")
        raise typer.Exit(EXIT_INTERRUPTED)
