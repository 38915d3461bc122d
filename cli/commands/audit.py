"""Commands that audit, replay, compare and prune a run."""

from __future__ import annotations

import gc
import getpass
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

from dora_pipe.cli.options import BLOB_HOURS, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_rows
from dora_pipe.cli.progress import watched
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS, say

if TYPE_CHECKING:
    from dora_pipe.audit.prune import PruneCandidate


def audit(
    run: RunArgument,
    store: Annotated[
        bool, typer.Option("--store/--no-store", help="Check the files of policies, too.")
    ] = True,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow", help="Audit a live run until it ends; report violations immediately."
        ),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Check digests only; skip record contents and decisions."),
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Verify the guarantees C1, C2 and C3 from the log of a run; exit code 5 if one is violated."""
    if follow and as_json:
        raise UsageError("--follow prints lines and does not support --json")
    from dora_pipe.audit.auditor import raise_if_broken
    from dora_pipe.audit.report import plain
    from dora_pipe.cli.audit import COLLECT_AFTER, AuditSession
    from dora_pipe.cli.audit_tables import print_report
    from dora_pipe.launch.run_dir import opened

    gc.set_threshold(COLLECT_AFTER, 20, 20)
    with opened(run, root) as open_run:
        session = AuditSession(open_run, store=store, quick=quick)
        report = session.follow() if follow else session.once()
    emit_json(plain(report)) if as_json else print_report(report)
    raise_if_broken(report)


def replay(
    run: RunArgument,
    trajectory: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="TRAJECTORY", help="Trajectories to generate again; default: repeat steps."
        ),
    ] = None,
    first: Annotated[
        int | None, typer.Option("--from", metavar="A", help="First step; default: 0.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--to", metavar="B", help="End step, exclusive; default: the last."),
    ] = None,
    random: Annotated[
        int, typer.Option("--random", metavar="N", help="Generate N random trajectories again.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the random selection.")] = 0,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Repeat steps A to B-1, or trajectories, and compare the bits; exit code 6 if any differs.

    `replay demo g0000000042-003` repeats a trajectory, `replay demo --random 10` ten of them.
    `rescore demo` repeats the rewards.
    """
    if (first is not None or last is not None) and (trajectory or random):
        raise UsageError(
            "TRAJECTORY and --random repeat sampling, --from repeats steps: choose one"
        )
    if first is not None and last is not None and first >= last:
        raise UsageError(f"--from {first} must be below --to {last}")
    from dora_pipe.cli.replay import replay_run, replay_trajectories
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (open_run, report):
        if trajectory or random:
            replay_trajectories(open_run, trajectory or (), random, seed, as_json=as_json)
        else:
            replay_run(open_run, first, last, as_json=as_json, report=report)


def mismatch(
    run: RunArgument,
    step: Annotated[
        int | None, typer.Option(metavar="N", help="Step; default: the last committed.")
    ] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Attribute the importance ratios of a batch to staleness, numerics, sampling, tokenization."""
    from dora_pipe.cli.mismatch import measure_step, print_mismatch
    from dora_pipe.launch.run_dir import opened

    with opened(run, root) as opened_run, watched(opened_run) as (looked, report):
        measured = measure_step(looked, step, report)
    if as_json:
        emit_json(measured.plain())
    else:
        print_mismatch(measured)


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
    ] = BLOB_HOURS,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """List unused files: orphans, and in a finished run those beyond its retention.

    Deletes nothing without --delete. Replay can rebuild a deleted version.
    """
    from dora_pipe.audit import prune as history
    from dora_pipe.audit.export import best_version
    from dora_pipe.audit.prune import plan_blobs, prune_blobs
    from dora_pipe.core.system.clock import SystemClock
    from dora_pipe.launch.run_dir import opened

    clock = SystemClock()
    with opened(run, root) as open_run:
        bus, names, store = open_run.bus, open_run.topics, open_run.policies
        with closing(open_run.tables()) as tables:
            best = best_version(tables, open_run.config)
        plan = history.plan_prune(
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
        count = history.prune(bus, names, store, plan, user=getpass.getuser(), clock=clock)
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
