"""`why`: what every role of a run waits for, and who or what it waits for in the end."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import datetime
from typing import Annotated, Final

import typer

from dora_pipe.cli.look import ArchiveOption, JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, say
from dora_pipe.cli.rundir import RUNS, OpenRun, opened
from dora_pipe.errors import UsageError
from dora_pipe.views.lineage import policy_after
from dora_pipe.views.why import Answer, why_at, why_now, why_step
from dora_pipe.views.why_steps import StepWait, is_over, steps_of
from dora_pipe.views.why_summary import Summary, summarise

STOPPED_AFTER_S: Final = 60.0
"""A run whose every role is silent for so long is shown as it was when it was heard last."""


def why(
    run: RunArgument,
    at: Annotated[
        str,
        typer.Option(metavar="TIME", help="At a moment: seconds after the start, or ISO 8601."),
    ] = "",
    step: Annotated[
        int | None, typer.Option(help="Before this step's batch was taken; how long it took.")
    ] = None,
    summary: Annotated[
        bool, typer.Option("--summary", help="Who waited how long for what in total.")
    ] = False,
    archive: ArchiveOption = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Say what every role waits for, since when, and which group, worker or version blocks it.

    Of a run that is over: who waited how long for what in total.
    """
    if sum((bool(at), step is not None, summary)) > 1:
        raise UsageError("--at, --step and --summary are three different questions")
    with opened(run, root, archive) as open_run:
        if summary:
            _print(summarise(open_run.bus, open_run.topics), as_json=as_json)
        elif at:
            moment_ns = _moment_ns(open_run, at)
            _print(why_at(open_run.bus, open_run.topics, at_ns=moment_ns), as_json=as_json)
        elif step is not None:
            _print_step(open_run, step, as_json=as_json)
        else:
            _print_present(open_run, as_json=as_json)


def _print_present(run: OpenRun, *, as_json: bool) -> None:
    if is_over(run.bus, run.topics):
        _print(summarise(run.bus, run.topics), as_json=as_json)
        return
    answer = why_now(run.bus, run.topics, now_ns=time.time_ns())
    if answer.heard_s is not None and answer.heard_s > STOPPED_AFTER_S:
        say(
            f"no role of {run.topics.run} was heard for {answer.heard_s:,.0f} s: it was stopped, "
            "or has died (`dora-pipe run ... --resume` goes on). This is how it was then:"
        )
        moment_ns = answer.at_ns - int(answer.heard_s * 1e9)
        _print(why_at(run.bus, run.topics, at_ns=moment_ns), as_json=as_json)
    else:
        _print(answer, as_json=as_json)


def _print_step(run: OpenRun, step: int, *, as_json: bool) -> None:
    answer = why_step(run.bus, run.topics, step=step)
    found = [one for one in steps_of(run.bus, run.topics).waits if one.step == step]
    if as_json:
        emit_json({"waits_of_step": _plain(found[0]), **asdict(answer)})
        return
    typer.echo(found[0].text())
    _print(answer, as_json=False)


def _print(answer: Answer | Summary, *, as_json: bool) -> None:
    if as_json:
        emit_json(asdict(answer))
        return
    for line in answer.lines():
        typer.echo(line)


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
