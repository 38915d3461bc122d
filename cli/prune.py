"""`prune`: list or delete files that no record needs."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from contextlib import closing
from typing import Annotated

import typer

from dora_pipe.audit.export import best_version
from dora_pipe.audit.prune import AGE_MIN_S, PruneCandidate, plan_blobs, plan_prune, prune_blobs
from dora_pipe.audit.prune import prune as prune_versions
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_rows
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.run_dir import opened


def prune(
    run: RunArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the listed files.")] = False,
    stopped: Annotated[
        bool,
        typer.Option("--stopped", help="Confirm that no role of this unfinished run is running."),
    ] = False,
    keep_every: Annotated[
        int | None,
        typer.Option(min=0, help="Keep every N-th checkpoint; default: store.keep_every."),
    ] = None,
    blob_hours: Annotated[
        float,
        typer.Option(min=0.0, help="Minimum age in hours of blobs that no record references."),
    ] = AGE_MIN_S / 3600,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """List unused files: orphans, and in a finished run those beyond its retention.

    Deletes nothing without --delete. Replay can rebuild a deleted version.
    """
    clock = SystemClock()
    with opened(run, root) as open_run:
        bus, names, store = open_run.bus, open_run.topics, open_run.policies
        with closing(open_run.tables()) as tables:
            best = best_version(tables, open_run.config)
        plan = plan_prune(
            bus,
            names,
            store,
            keep_every=open_run.config.store.keep_every if keep_every is None else keep_every,
            stopped=stopped,
            clock=clock,
            keep=() if best is None else best[:1],
        )
        blobs = plan_blobs(bus, names, store, clock=clock, age_min_s=blob_hours * 3600)
        candidates = (*plan.candidates, *blobs.candidates)
        _print_candidates(candidates, as_json=as_json)
        files, size = plan.files + blobs.files, plan.bytes + blobs.bytes
        freed = f"{(plan.freed_bytes + blobs.freed_bytes) / 1e6:.1f} of {size / 1e6:.1f} MB"
        for note in filter(None, (blobs.note, plan.note)):
            say(note)
        if not delete:
            say(f"{len(candidates)} of {files} files, {freed}; --delete deletes them")
            return
        count = prune_versions(bus, names, store, plan, user=getpass.getuser(), clock=clock)
        count += prune_blobs(store, blobs)
        say(f"{count} of {files} files deleted, {freed}")


def _print_candidates(candidates: Sequence[PruneCandidate], *, as_json: bool) -> None:
    rows = [
        {
            "file": candidate.file.name,
            "bytes": candidate.file.bytes,
            "why": candidate.why,
            "version": "" if candidate.version is None else candidate.version,
        }
        for candidate in candidates
    ]
    emit_rows(("file", "bytes", "why", "version"), rows, as_json=as_json)
