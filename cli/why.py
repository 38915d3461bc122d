"""`why`: explain what each role waits for."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Final

import typer

from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.core.errors import UsageError
from dora_pipe.core.loop.run_lifecycle import run_is_over
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.core.system.console import RUNS, say
from dora_pipe.launch.disk_watch import broker_words, full_disk
from dora_pipe.launch.run_dir import OpenRun, opened
from dora_pipe.observe.lineage import first_record
from dora_pipe.observe.text import duration
from dora_pipe.observe.waits import StepWait, Summary, summarise, waits_of
from dora_pipe.observe.why import WhyAnswer, why_at, why_now

STOPPED_AFTER_S: Final = 60.0
"""A run whose roles are all silent for this long is shown as of its last status."""

BLANK: Final = " "
"""Empty cell; "" would appear as a dash."""


def why(
    run: RunArgument,
    moment: Annotated[
        str,
        typer.Option(
            "--at", metavar="TIME", help="Point in time: seconds after the start, or ISO 8601."
        ),
    ] = "",
    step: Annotated[int | None, typer.Option(help="Time of this step's batch decision.")] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Print totals of an unfinished run.")
    ] = False,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Explain what each role waits for, since when, which role blocks it, and what to do about it.

    For a finished run: how long each role waited in total, and for what.
    """
    if sum((bool(moment), step is not None, summary)) > 1:
        raise UsageError("--at, --step and --summary exclude each other")
    with opened(run, root) as open_run:
        bus, topics = open_run.bus, open_run.topics
        if summary:
            _print_summary(open_run, as_json=as_json)
        elif moment:
            moment_ns = _moment_ns(open_run, moment)
            _print_answer(why_at(bus, topics, at_ns=moment_ns), as_json=as_json)
        elif step is not None:
            wait = _wait_of(open_run, step)
            moment_ns = wait.taken_ns - 1
            _print_answer(why_at(bus, topics, at_ns=moment_ns), wait, as_json=as_json)
        else:
            _print_present(open_run, as_json=as_json)


def _print_present(run: OpenRun, *, as_json: bool) -> None:
    end = run.bus.end(TopicPartition(run.topics.decisions, 0))
    if run_is_over(run.bus, run.topics, end, SystemClock()):
        _print_summary(run, as_json=as_json)
        return
    if full := full_disk(run.directory.path, run.store):
        say(f"{full}; the run waits for disk space and dispatches nothing")
    elif words := broker_words(run.config, run.bus, run.topics):
        say(words)
    answer = why_now(run.bus, run.topics, now_ns=time.time_ns())
    if answer.heard_s is not None and answer.heard_s > STOPPED_AFTER_S:
        say(
            f"no role of {run.topics.run} sent a status for {answer.heard_s:,.0f} s: the run "
            "stopped or died (`dora-pipe run ... --resume` resumes it). Last known state:"
        )
        moment_ns = answer.at_ns - int(answer.heard_s * 1e9)
        answer = why_at(run.bus, run.topics, at_ns=moment_ns)
    _print_answer(answer, as_json=as_json)


def _wait_of(run: OpenRun, step: int) -> StepWait:
    with closing(run.tables()) as tables:
        wait = next((wait for wait in waits_of(tables) if wait.step == step), None)
    if wait is None:
        raise UsageError(
            f"the batch of step {step} has not been taken", hint="see `why` without it"
        )
    return wait


def _print_answer(answer: WhyAnswer, wait: StepWait | None = None, *, as_json: bool) -> None:
    if as_json:
        step = {} if wait is None else {"waits_of_step": asdict(wait)}
        emit_json({**step, **asdict(answer)})
        return
    if wait is not None:
        emit_line(wait.text())
    for line in answer.lines():
        emit_line(line)
    emit_line()
    rows = [
        (
            role.role,
            role.text,
            BLANK if role.since_s is None else duration(role.since_s),
            role.end or BLANK,
            role.advice or BLANK,
        )
        for role in answer.roles
    ]
    columns = ("role", "state", "since", "blocking", "action")
    emit_table(columns, rows)
    for depth, line in enumerate(answer.trainer_chain()):
        if not depth:
            emit_line()
        emit_line("  " * depth + line)


def _print_summary(run: OpenRun, *, as_json: bool) -> None:
    with closing(run.tables()) as tables:
        summary = summarise(run.bus, run.topics, tables)
    if as_json:
        emit_json(asdict(summary))
        return
    above = (summary.head, summary.failed.words, summary.ahead, *summary.alarms)
    for line in filter(None, above):
        emit_line(line)
    emit_line()
    _emit_waits(summary)
    if summary.longest:
        emit_line()
        emit_table(
            ("step", "waited", "last arrival", "version", "from", "most of it for"),
            [_longest(wait) for wait in summary.longest],
            title="Longest batch waits (details: --step N)",
        )


def _emit_waits(summary: Summary) -> None:
    rows = [
        (role or BLANK, duration(seconds), f"{share:.0%}", what or BLANK, advice or BLANK)
        for role_waits in summary.shown
        for role, seconds, share, what, advice in role_waits.rows()
    ]
    if stopped_s := sum(summary.stops):
        share = f"{stopped_s / (summary.run_s + stopped_s):.0%} of all"
        rows.insert(0, ("stopped", duration(stopped_s), share, "the run was stopped", BLANK))
    emit_table(("role", "waited", "share", "for", "action"), rows)
    if more := len(summary.roles) - len(summary.shown):
        emit_line(f"and {more} more workers, which waited less")


def _longest(wait: StepWait) -> tuple[object, ...]:
    most = max(wait.pieces, key=lambda piece: piece.seconds, default=None)
    words = "" if most is None else f"{most.words()}: {most.seconds:.2f} s"
    return wait.step, f"{wait.waited_s:.2f} s", wait.last, wait.version, wait.worker, words


def _moment_ns(run: OpenRun, text: str) -> int:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        pass
    else:
        return first_record(run.bus, run.topics).at_ns + int(seconds * 1e9)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"not a point in time: {text!r}",
            hint="31.5 is seconds after the start; or give 2026-11-21T11:05:54+00:00",
        ) from None
    return int(moment.timestamp() * 1e9)
