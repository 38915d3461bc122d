"""How answers of `why` look on a terminal."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Final

from dora_pipe.bus.port import TopicPartition
from dora_pipe.cli.output import emit_json, emit_line, emit_table
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import UsageError
from dora_pipe.core.run_lifecycle import run_is_over
from dora_pipe.launch.disk_watch import broker_words, full_disk
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.observe.text import duration
from dora_pipe.observe.why.answer import WhyAnswer, why_at, why_now, why_step
from dora_pipe.observe.why.fallbacks import lines_of
from dora_pipe.observe.why.slots import WORDS as SLOT_WORDS
from dora_pipe.observe.why.slots import SlotSpan, slots_of
from dora_pipe.observe.why.summary import (
    STOPS,
    RoleWaits,
    StepWait,
    Summary,
    summarise,
    waits_of,
)

STOPPED_AFTER_S: Final = 60.0
"""A run whose every role is silent for so long is shown as it was when it was heard last."""

ROLES_MAX: Final = 10
"""Roles in a summary: trainer, orchestrator, and the workers that waited longest."""

FIRST: Final = 2
"""Trainer and orchestrator stand first."""

BLANK: Final = " "
"""A cell that says nothing, not even that there is nothing."""

STOPPED: Final = "the run was stopped"

TREE_HINT: Final = "--tree names every group and request on the way"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One question: a moment, a step, the whole, its slots, or the present."""

    at: str
    step: int | None
    summary: bool
    slots: bool
    tree: bool
    as_json: bool


def answer(run: OpenRun, asked: Asked) -> None:
    """Print it. Raises UsageError for what cannot be asked."""
    if asked.summary:
        _print_summary(run, asked)
    elif asked.slots:
        _print_slots(run, asked)
    elif asked.at and run.directory.lender:
        raise UsageError(
            f"{run.topics.run} was trained on the trajectories of {run.directory.lender}: nobody "
            "but its trainer has waited",
            hint=f"--summary, --step N, or `why {run.directory.lender}`",
        )
    elif asked.at:
        moment_ns = _moment_ns(run, asked.at)
        _print_answer(why_at(run.bus, run.topics, at_ns=moment_ns), asked)
    elif asked.step is not None:
        _print_step(run, asked.step, asked)
    else:
        _print_present(run, asked)


def _print_present(run: OpenRun, asked: Asked) -> None:
    end = run.bus.end(TopicPartition(run.topics.decisions, 0))
    if run.directory.lender or run_is_over(run.bus, run.topics, end, SystemClock()):
        _print_summary(run, asked)
        return
    if full := full_disk(run.directory.path, run.store):
        say(f"{full}; the run waits for room, and dispatches nothing")
    elif words := broker_words(run.config, run.bus, run.topics):
        say(words)
    found = why_now(run.bus, run.topics, now_ns=time.time_ns())
    if found.heard_s is not None and found.heard_s > STOPPED_AFTER_S:
        say(
            f"no role of {run.topics.run} was heard for {found.heard_s:,.0f} s: it was stopped, "
            "or has died (`dora-pipe run ... --resume` goes on). This is how it was then:"
        )
        moment_ns = found.at_ns - int(found.heard_s * 1e9)
        found = why_at(run.bus, run.topics, at_ns=moment_ns)
    _print_answer(found, asked)


def _print_step(run: OpenRun, step: int, asked: Asked) -> None:
    if run.directory.lender:  # Its roles decide and wait for nothing but the step before.
        wait = _wait_of(run, step)
        emit_json({"waits_of_step": _plain(wait)}) if asked.as_json else emit_line(wait.text())
        return
    found = why_step(run.bus, run.topics, step=step)
    wait = _wait_of(run, step)
    if asked.as_json:
        emit_json({"waits_of_step": _plain(wait), **asdict(found)})
        return
    emit_line(wait.text())
    _print_answer(found, asked)


def _wait_of(run: OpenRun, step: int) -> StepWait:
    with closing(run.tables()) as tables:
        for one in waits_of(tables):
            if one.step == step:
                return one
    raise UsageError(f"step {step} was not taken yet")


def _print_answer(found: WhyAnswer, asked: Asked) -> None:
    if asked.as_json:
        emit_json(asdict(found))
        return
    emit_line(found.head)
    for line in filter(None, (found.stopped, found.failed)):
        emit_line(line)
    if found.no_step:
        emit_line(found.no_step)
    for alarm in found.alarms:
        emit_line(f"ALARM {alarm}")
    for line in lines_of(found.fallbacks):
        emit_line(line)
    emit_line()
    rows = [
        (role, text, BLANK if since_s is None else duration(since_s), end or BLANK, advice or BLANK)
        for role, since_s, text, end, advice in found.rows()
    ]
    columns = ("role", "does or waits for", "since", "in the end", "what to do")
    emit_table(columns, rows, drop=("in the end", "since"))
    if not asked.tree:
        say(TREE_HINT)
        return
    emit_line()
    for line in found.tree():
        emit_line(line)


def _print_summary(run: OpenRun, asked: Asked) -> None:
    with closing(run.tables()) as tables:
        found = summarise(run.bus, run.topics, tables)
    if asked.as_json:
        emit_json(asdict(found))
        return
    emit_line(found.head)
    if found.failed.words:
        emit_line(found.failed.words)
    if found.ahead:
        emit_line(found.ahead)
    for alarm in found.alarms:
        emit_line(alarm)
    for line in lines_of(found.fallbacks):
        emit_line(line)
    emit_line()
    _emit_waits(found)
    if not found.longest:
        return
    emit_line()
    emit_table(
        ("step", "waited", "last came", "version", "from", "most of it for"),
        [_longest(one) for one in found.longest],
        title="The steps that waited longest for their batch (--step N says more)",
        drop=("version",),
    )


def shown_roles(found: Summary) -> tuple[RoleWaits, ...]:
    """All, or of many the workers that waited longest."""
    roles = found.roles
    if len(roles) <= ROLES_MAX:
        return roles
    workers = sorted(roles[FIRST:], key=lambda one: -one.waited_s)
    return (*roles[:FIRST], *workers[: ROLES_MAX - FIRST])


def _emit_waits(found: Summary) -> None:
    """Who waited how long for what, and what to do about it."""
    roles = shown_roles(found)
    rows = [
        (role or BLANK, duration(seconds), f"{share:.0%}", what or BLANK, advice or BLANK)
        for one in roles
        for role, seconds, share, what, advice in one.rows()
    ]
    if found.stops:
        whole_s, stopped_s = found.run_s + sum(found.stops), sum(found.stops)
        share = f"{stopped_s / whole_s:.0%} of all"
        rows.insert(0, ("stopped", duration(stopped_s), share, STOPPED, BLANK))
    emit_table(("role", "waited", "share", "for", "what to do"), rows, drop=("share", "what to do"))
    if len(roles) < len(found.roles):
        emit_line(f"and {len(found.roles) - len(roles)} more workers, which waited less")


def _print_slots(run: OpenRun, asked: Asked) -> None:
    with closing(run.tables()) as tables:
        stops = tables.query(STOPS)
    found = slots_of(run.bus, run.topics, stops)
    if asked.as_json:
        emit_json({"whole": _shares(found.whole), "steps": [_shares(one) for one in found.steps]})
        return
    emit_line(found.head)
    emit_line()
    emit_table(
        ("slots", "share", "no step trains", "what to do"),
        [
            (what, f"{share:.1%}", f"{waiting:.1%}", advice or BLANK)
            for what, share, waiting, advice in found.whole.rows()
        ],
        drop=("what to do",),
    )
    if not found.emptiest:
        return
    emit_line()
    emit_table(
        ("step", "lasted", "in use", "most of the others"),
        [_emptiest(one) for one in found.emptiest],
        title="The steps whose slots were empty for longest",
    )


def _emptiest(step: SlotSpan) -> tuple[object, ...]:
    most = next(one for one in step.uses if one != "busy")
    words = f"{SLOT_WORDS[most]}: {step.share(most):.0%}"
    return step.step, f"{step.seconds:.2f} s", f"{step.share('busy'):.0%}", words


def _shares(span: SlotSpan) -> dict[str, object]:
    return {
        "step": span.step,
        "seconds": span.seconds,
        "shares": {use: span.share(use) for use in span.uses},
        "while_no_step_trains": {use: span.waiting_share(use) for use in span.uses},
    }


def _longest(wait: StepWait) -> tuple[object, ...]:
    most = max(wait.pieces, key=lambda one: one.seconds, default=None)
    words = "" if most is None else f"{most.words()}: {most.seconds:.2f} s"
    return wait.step, f"{wait.waited_s:.2f} s", wait.last, wait.version, wait.worker, words


def _plain(wait: StepWait) -> dict[str, object]:
    return {**asdict(wait), "waited_s": wait.waited_s}


def _moment_ns(run: OpenRun, text: str) -> int:
    """A moment as wall clock ns. Raises UsageError."""
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        pass
    else:
        first, _ = policy_after(run.bus, run.topics, 0)
        return first.at_ns + int(seconds * 1e9)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"not a moment: {text!r}",
            hint="31.5 is seconds after the start; or give 2026-11-21T11:05:54+00:00",
        ) from None
    return int(moment.timestamp() * 1e9)
