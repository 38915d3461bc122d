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
    other: Annotated[str, typer.Argument(metavar="OTHER", help="Another run, named likewise.")],
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Where two runs part: keys, what they are made of, versions, dispatches, batches, the first
    trajectory that differs under equal weights and why, and both curves."""
    from dora_pipe.cli.diff import diff_runs
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as one, opened(other, root) as two:
        diff_runs(one, two, as_json=as_json)


def fork(
    run: RunArgument,
    trajectory: Annotated[str, typer.Argument(metavar="TRAJECTORY", help="As `show` names it.")],
    turn: Annotated[
        int | None, typer.Option(help="The turn that is sampled anew; without, every one is.")
    ] = None,
    at: Annotated[
        list[int] | None, typer.Option("--at", metavar="TOKEN", help="Cut behind so many tokens.")
    ] = None,
    pieces: Annotated[
        int | None, typer.Option(help="Cut at the beginnings of so many equal pieces.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Continuations from each place.")] = 16,
    version: Annotated[
        int | None, typer.Option(help="Who continues; without, the version that sampled it.")
    ] = None,
    replayable: Annotated[
        bool,
        typer.Option(
            "--replayable", help="Tell the environment its turns again, though it does not say so."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where it goes; in the run's directory.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Which turn decided an episode: continuations from each of its turns, under any version, and
    their mean reward. The log stays as it is; the same command goes on, with the same bits."""
    from dora_pipe.cli.fork import Wanted, fork_trajectory
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as found, watched(found) as (open_run, report):
        fork_trajectory(
            open_run,
            trajectory,
            Wanted(turn=turn, at=tuple(at or ()), pieces=pieces, samples=samples),
            version=version,
            replayable=replayable,
            out=out,
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
            help="module:function, a built-in one, or what `task.rewards` may be, of every task; "
            "NAME=USE of one. Without: the run's own, as it is here.",
        ),
    ] = None,
    directory: Annotated[
        Path | None,
        typer.Option(help="Where the module is imported from; the folder of the run's file."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where scores go; in the run's directory.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Ask a reward of all logged texts: which groups would have had another fate, which advantages
    another sign, and the curves of both. The log stays as it is; the same command goes on."""
    from dora_pipe.cli.rescore import rescore_run
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as found, watched(found) as (open_run, report):
        rescore_run(
            open_run, reward or (), directory=directory, out=out, as_json=as_json, report=report
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
