"""`prune`: says which files of a run's policy store nobody needs, and deletes them if asked to."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dora_pipe.cli.look import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_rows, say
from dora_pipe.cli.rundir import RUNS, opened
from dora_pipe.clock import SystemClock
from dora_pipe.history import prune as history
from dora_pipe.history.prune import Doomed


def prune(
    run: RunArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Delete; else only say what.")] = False,
    stopped: Annotated[
        bool, typer.Option("--stopped", help="No role of this unfinished run is running.")
    ] = False,
    keep_every: Annotated[
        int | None,
        typer.Option(min=0, help="Of the checkpoints; default: store.keep_every of the run."),
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Name files that nobody needs: orphans, and in a finished run what retention drops.

    Nothing is deleted without --delete. A version that is needed again is made again by replay.
    """
    clock = SystemClock()
    with opened(run, root) as open_run:
        store = open_run.policies
        plan = history.plan_prune(
            open_run.bus,
            open_run.topics,
            store,
            keep_every=open_run.config.store.keep_every if keep_every is None else keep_every,
            stopped=stopped,
            clock=clock,
        )
        emit_rows(("file", "bytes", "why", "version"), _rows(plan.doomed), as_json=as_json)
        freed = f"{plan.freed_bytes / 1e6:.1f} of {plan.bytes / 1e6:.1f} MB"
        if not delete:
            say(f"{len(plan.doomed)} of {plan.files} files, {freed}; --delete deletes them")
            return
        user = getpass.getuser()
        count = history.prune(open_run.bus, open_run.topics, store, plan, user=user, clock=clock)
        say(f"{count} of {plan.files} files deleted, {freed}")


def _rows(doomed: Sequence[Doomed]) -> list[dict[str, Any]]:
    return [
        {
            "file": one.file.name,
            "bytes": one.file.bytes,
            "why": one.why,
            "version": "" if one.version is None else one.version,
        }
        for one in doomed
    ]
