"""`export`: write trajectories, a policy, traces or metrics of a run for other tools."""

from __future__ import annotations

import hashlib
import os
from contextlib import closing
from pathlib import Path
from typing import Annotated, Final

import typer

from dora_pipe.audit.export import best_version, export_parquet, export_policy, logged_versions
from dora_pipe.audit.model_card import write_beside
from dora_pipe.audit.statement import write_statement
from dora_pipe.cli.options import (
    ForceOption,
    RunArgument,
    RunsOption,
    may_write_file,
    may_write_folder,
)
from dora_pipe.cli.output import raise_if_damaged
from dora_pipe.cli.progress import opened_watched
from dora_pipe.cli.replay import rebuilder
from dora_pipe.cli.texts import texts_of
from dora_pipe.config.model import Task
from dora_pipe.core.errors import ConfigError, DoraError, PolicyError, ResourceError, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.plan import started
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.ledger.database import Catalogue
from dora_pipe.observe.following import Checkpoint
from dora_pipe.observe.traces.follow import TraceSender
from dora_pipe.observe.traces.sinks import FileSink, HttpSink, Sink, address_of, is_address
from dora_pipe.observe.trackers.sink import TensorBoardTracker, Tracker, WandbTracker
from dora_pipe.observe.trackers.steps import track
from dora_pipe.orchestrator.watched import watched_evaluation

CHECKPOINTS: Final = "traces-sent"
CHECKPOINT_DIGITS: Final = 16


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
    with opened_watched(run, root) as (source, _):
        may_write_file(file, force=force)
        texts = texts_of(source)
        with closing(source.tables()) as tables:
            done = export_parquet(
                source.bus,
                source.topics,
                tables,
                source.policies,
                file,
                everything=everything,
                texts=texts,
            )
    suffix = f", {done.left_out} records left out" if done.left_out else ""
    say(f"{file}: {done.rows} trajectories, {done.bytes / 1e6:.1f} MB{suffix}")
    raise_if_damaged(done.damage, f", and not in {file}")


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
    with opened_watched(run, root) as (source, _):
        may_write_folder(directory, force=force)
        number = version_of(source, version)
        digest = write_policy(source, number, directory)
        say(f"{directory}: version {number}, weights {digest}")
        if statement:
            with closing(source.tables()) as tables:
                file = write_statement(source.bus, source.topics, tables, directory, number)
            say(f"{file}: in-toto statement over the other files, unsigned")


def write_policy(run: OpenRun, version: int, directory: Path) -> str:
    """Write a version and its other files; return its weights digest."""
    with closing(run.tables()) as tables:
        rebuilder(run).weights(version)
        digest = export_policy(tables, run.policies, version, directory)
        run.policies.mend(digest)
        write_beside(
            directory, tables, run.config, version, _stop_ids(directory, tables, run.config.task)
        )
    return digest


def _stop_ids(model: Path, tables: Catalogue, task: Task) -> tuple[int, ...]:
    try:
        from dora_pipe.producers.chat.chat import Chat
        from dora_pipe.producers.chat.tokenizer import Tokenizer
        from dora_pipe.producers.worker.chats import chat_options

        tokenizer = Tokenizer(model)
        chat = any(row.get("template_digest") for row in tables.records("select * from workers"))
        if not chat:
            return tokenizer.stop_ids
        return Chat.open(model, tokenizer, chat_options(task, started_ns=0)).stop_ids
    except (ImportError, PolicyError, ConfigError) as error:
        say(f"note: generation_config.json keeps its end-of-sequence tokens: {error}")
        return ()


def version_of(run: OpenRun, policy: str) -> int:
    """Return a version's number, or the number of `best`. Raises UsageError."""
    if policy.isdecimal():
        return int(policy)
    if policy != "best":
        raise UsageError(f"version {policy!r}: expected a number or `best`")
    name = (watched_evaluation(run.config) or run.config.evaluation).name
    with closing(run.tables()) as tables:
        best = best_version(tables, run.config)
        logged = [best] if best is not None else logged_versions(tables, name)
    if not logged:
        raise UsageError(
            f"run {run.topics.run} has no best version",
            hint="it needs a complete evaluation: evaluation.every, evaluation.prompts",
        )
    for version, reward in logged:
        try:
            rebuilder(run).weights(version)
        except DoraError as error:
            say(f"version {version}, {reward:.3f}, is not available: {error.message}")
            continue
        say(f"best: version {version}, {reward:.3f} in evaluation {name}".removesuffix(" "))
        return version
    raise PolicyError(f"no evaluated version has its weights left ({len(logged)} tried)")


def tensorboard(
    run: RunArgument,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The folder of event files.")],
    follow: FollowOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write the metrics of each step as TensorBoard event files."""
    with opened(run, root) as source:
        target = str(directory / source.topics.run)
        _export_metrics(source, TensorBoardTracker(directory), target, follow=follow)


def wandb(
    run: RunArgument,
    project: Annotated[str, typer.Argument(help="A project of W&B.")],
    follow: FollowOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Write the metrics of each step to W&B; offline unless WANDB_MODE=online."""
    with opened(run, root) as source:
        _export_metrics(source, WandbTracker(project), f"W&B project {project}", follow=follow)


def _export_metrics(run: OpenRun, tracker: Tracker, target: str, *, follow: bool) -> None:
    with closing(tracker):
        clock = SystemClock() if follow else None
        over = track(run.bus, run.topics, tracker, run.contributions, clock=clock)
    there = f", {tracker.before} already exported" if tracker.before else ""
    goes_on = "" if over else "; the run continues: run this command again"
    say(f"{target}: {max(0, tracker.rows) - tracker.before} rows{there}{goes_on}")


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
    if follow:  # the sender reports its own waits
        with opened(run, root) as source:
            _export_traces(source, target, ratio, follow=True, force=force)
        return
    with opened_watched(run, root) as (source, report):
        report("sending traces")
        _export_traces(source, target, ratio, follow=False, force=force)


def _export_traces(run: OpenRun, target: str, ratio: float, *, follow: bool, force: bool) -> None:
    def sender(sink: Sink, checkpoint: Checkpoint | None = None) -> TraceSender:
        clock = SystemClock()
        return TraceSender(
            run.bus, run.topics, sink, clock=clock, ratio=ratio, checkpoint=checkpoint
        )

    rejected = ""
    if is_address(target):
        checkpoint = Checkpoint(_checkpoint_of(run, address_of(target), ratio))
        if checkpoint.read() is not None:
            say(f"earlier traces are not sent again; to send all, remove {checkpoint.path}")
        with closing(HttpSink(target)) as sink:
            sending = sender(sink, checkpoint)
            done = sending.follow() if follow else sending.whole()
        if sink.rejected:
            why = f": {sink.reason}" if sink.reason else ""
            rejected = f", {sink.rejected} rejected by the endpoint{why}"
            done.spans -= sink.rejected
    elif follow:
        raise UsageError(
            "--follow sends to an address",
            hint="e.g. export traces RUN http://127.0.0.1:4318 --follow",
        )
    else:
        may_write_file(Path(target), force=force)
        with FileSink(Path(target)) as file:
            done = sender(file).whole()
    left_out = f", {done.left_out} groups left out by their share" if done.left_out else ""
    say(f"{target}: {done.groups} groups, {done.spans} spans{rejected}{left_out}")
    if done.open:
        say(f"note: {done.open} open groups skipped")
    if not done.whole:
        raise ResourceError(
            "some traces were not sent", hint="run the same command again to continue"
        )
    raise_if_damaged(done.damage, ", their traces contain events only")


def _checkpoint_of(run: OpenRun, address: str, ratio: float) -> Path | None:
    """Return the position file for this run, address and ratio; None before the run's start.

    It is in the run's directory, or in the user's cache if that is missing or read-only.
    """
    first = started(run.bus, run.topics)
    if first is None:
        return None
    key = (address, first.run, first.at_ns, ratio)
    name = hashlib.sha256("\n".join(map(str, key)).encode()).hexdigest()[:CHECKPOINT_DIGITS]
    own = run.directory
    if own.path.is_dir():
        return own.path / CHECKPOINTS / name
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dora-pipe" / CHECKPOINTS / name
