"""`prune`: says which files of a run's policy store nobody needs, and deletes them if asked to."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_rows, say
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.clock import Clock, SystemClock
from dora_pipe.history import prune as history
from dora_pipe.history.prune import Doomed
from dora_pipe.history.prune_claims import AGE_MIN_S, ClaimPlan, plan_claims, prune_claims

HOUR_S = 3600.0


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
    claim_hours: Annotated[
        float,
        typer.Option(min=0.0, help="Values that no record claims: only those that are older."),
    ] = AGE_MIN_S / HOUR_S,
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Name files that nobody needs: orphans, and in a finished run what retention drops.

    Nothing is deleted without --delete. A version that is needed again is made again by replay.
    """
    clock = SystemClock()
    with opened(run, root, archive) as open_run:
        store = open_run.policies
        plan = history.plan_prune(
            open_run.bus,
            open_run.topics,
            store,
            keep_every=open_run.config.store.keep_every if keep_every is None else keep_every,
            stopped=stopped,
            clock=clock,
        )
        claims = _claims(open_run, archive, claim_hours, clock)
        doomed = (*plan.doomed, *claims.doomed)
        emit_rows(("file", "bytes", "why", "version"), _rows(doomed), as_json=as_json)
        files, size = plan.files + claims.files, plan.bytes + claims.bytes
        freed = f"{(plan.freed_bytes + claims.freed_bytes) / 1e6:.1f} of {size / 1e6:.1f} MB"
        if claims.note:
            say(claims.note)
        if not delete:
            say(f"{len(doomed)} of {files} files, {freed}; --delete deletes them")
            return
        user = getpass.getuser()
        count = history.prune(open_run.bus, open_run.topics, store, plan, user=user, clock=clock)
        count += prune_claims(store, claims)
        say(f"{count} of {files} files deleted, {freed}")


def _claims(run: OpenRun, archive: Path | None, hours: float, clock: Clock) -> ClaimPlan:
    """Values beside the log that no record names; an archive's own are never touched."""
    if run.directory.is_archive:
        return ClaimPlan()
    return plan_claims(
        run.bus,
        run.topics,
        run.policies,
        clock=clock,
        archive=archive or run.directory.archive,
        age_min_s=hours * HOUR_S,
    )


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
