"""`export`: write trajectories, a policy, traces or metrics of a run for other tools."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.audit.export import best_version, export_parquet, export_policy, logged_versions
from dora_pipe.audit.model_card import write_beside
from dora_pipe.audit.statement import write_statement
from dora_pipe.cli.options import may_write_file, may_write_folder
from dora_pipe.cli.output import raise_if_damaged
from dora_pipe.cli.replay import rebuilder
from dora_pipe.cli.texts import texts_of
from dora_pipe.config.model import Task
from dora_pipe.core.errors import ConfigError, DoraError, PolicyError, ResourceError, UsageError
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import say
from dora_pipe.launch.plan import started
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.database import Catalogue
from dora_pipe.observe.following import Checkpoint
from dora_pipe.observe.traces.follow import TraceSender
from dora_pipe.observe.traces.sinks import FileSink, HttpSink, Sink, address_of, is_address
from dora_pipe.observe.trackers.sink import TensorBoardTracker, Tracker, WandbTracker
from dora_pipe.observe.trackers.steps import track
from dora_pipe.orchestrator.watched import watched_evaluation

CHECKPOINTS: Final = "traces-sent"
CHECKPOINT_DIGITS: Final = 16


def export_parquet_file(run: OpenRun, parquet: Path, *, everything: bool, force: bool) -> None:
    """Write the trajectories of a run. Raises InvariantBroken if some are damaged."""
    may_write_file(parquet, force=force)
    texts = texts_of(run)
    with closing(run.tables()) as tables:
        done = export_parquet(
            run.bus, run.topics, tables, run.policies, parquet, everything=everything, texts=texts
        )
    suffix = f", {done.left_out} records left out" if done.left_out else ""
    say(f"{parquet}: {done.rows} trajectories, {done.bytes / 1e6:.1f} MB{suffix}")
    raise_if_damaged(done.damage, f", and not in {parquet}")


def export_policy_dir(
    run: OpenRun, policy: str, directory: Path, *, force: bool, statement: bool = False
) -> None:
    """Write a version (a number or `best`) as a model directory."""
    may_write_folder(directory, force=force)
    version = version_of(run, policy)
    digest = write_policy(run, version, directory)
    say(f"{directory}: version {version}, weights {digest}")
    if statement:
        with closing(run.tables()) as tables:
            file = write_statement(run.bus, run.topics, tables, directory, version)
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
    """Return the tokens that ended turns, by tokenizer and chat template; empty if unknown."""
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


def export_tensorboard(run: OpenRun, folder: Path, *, follow: bool) -> None:
    """Write event files of a run; `follow` waits for new records."""
    _export_figures(run, TensorBoardTracker(folder), str(folder / run.topics.run), follow=follow)


def export_wandb(run: OpenRun, project: str, *, follow: bool) -> None:
    """Write a run to a W&B project, offline unless the environment says otherwise."""
    _export_figures(run, WandbTracker(project), f"W&B project {project}", follow=follow)


def _export_figures(run: OpenRun, tracker: Tracker, target: str, *, follow: bool) -> None:
    with closing(tracker):
        clock = SystemClock() if follow else None
        over = track(run.bus, run.topics, tracker, run.contributions, clock=clock)
    there = f", {tracker.before} already exported" if tracker.before else ""
    goes_on = "" if over else "; the run continues: run this command again"
    say(f"{target}: {max(0, tracker.rows) - tracker.before} rows{there}{goes_on}")


def export_traces(
    run: OpenRun,
    target: str,
    *,
    follow: bool,
    ratio: float,
    force: bool,
    report: Callable[[str], None],
) -> None:
    """Write traces to a file or an address; `follow` waits for new records."""

    def sender(sink: Sink, checkpoint: Checkpoint | None = None) -> TraceSender:
        clock = SystemClock()
        return TraceSender(
            run.bus, run.topics, sink, clock=clock, ratio=ratio, checkpoint=checkpoint
        )

    rejected = ""
    report("sending traces")
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
