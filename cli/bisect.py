"""`bisect`: find the versions between which a run degraded, and the responsible group."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from dora_pipe.analysis.bisect import Explanation, Fall, Limits, Measured, Trial
from dora_pipe.analysis.bisected_run import BisectedRun, Repeater
from dora_pipe.analysis.probes import opened_probe
from dora_pipe.analysis.replay import SourceRun
from dora_pipe.analysis.suspects import Suspect
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table, show
from dora_pipe.cli.progress import opened_watched
from dora_pipe.core.errors import UsageError
from dora_pipe.core.system.console import RUNS
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.ledger.evaluations import Interval
from dora_pipe.ledger.marks import SETTINGS
from dora_pipe.observe.text import counted

SUSPECTS_SHOWN: Final = 8
NAMES_SHOWN: Final = 3


def bisect(
    run: RunArgument,
    good: Annotated[int, typer.Option(min=0, metavar="VERSION", help="A good version.")],
    bad: Annotated[int, typer.Option(min=1, metavar="VERSION", help="A later, bad version.")],
    probe: Annotated[
        str,
        typer.Option(
            metavar="PROBE",
            help="An evaluation of the run (eval or eval:NAME), or a module:function that maps a "
            "checkpoint folder to one number or a number per row.",
        ),
    ] = "eval",
    steps: Annotated[int, typer.Option(min=0, help="Maximum repeated steps of all trials.")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="Draws per version.")] = 512,
    directory: Annotated[Path | None, typer.Option(help="Import directory of the probe.")] = None,
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Find the step that made a run bad, and the group whose removal fixes it.

    Prints changed settings before the search.
    """
    limits = Limits(draws=draws, steps=steps)
    with opened_watched(run, root) as (open_run, report):
        source = SourceRun.of(open_run)
        changes = _changes_between(open_run, good, bad, newest=source.history.next_step)
        if not as_json:
            emit_line(settings_words(changes, good, bad))
        with (
            opened_probe(open_run, probe, directory, report) as opened,
            tempfile.TemporaryDirectory(prefix="dora-pipe-bisect-") as folder,
        ):
            repeater = Repeater(run=source, folder=Path(folder))
            bisected = BisectedRun(repeater=repeater, probe=opened, limits=limits, report=report)
            fall = bisected.search(good, bad)
            if not as_json:
                _print_fall(fall)
            explanation = bisected.explain(fall, good) if fall.sure else None
        if as_json:
            emit_json(plain(fall, explanation, changes))
        elif explanation is not None:
            _print_cause(explanation, changes)


def _changes_between(run: OpenRun, good: int, bad: int, *, newest: int) -> list[str]:
    if not 0 <= good < bad <= newest:
        raise UsageError(
            f"--good {good} --bad {bad}: no versions to bisect",
            hint=f"--good is before --bad, and there are versions 0 to {newest}",
        )
    with closing(run.tables()) as tables:
        rows = tables.query(SETTINGS)
    return [f"step {step}: {change}" for step, change in rows if good <= step < bad]


def settings_words(changes: Sequence[str], good: int, bad: int) -> str:
    """Describe the settings that changed between two versions."""
    between = f"between version {good} and version {bad}"
    if not changes:
        return f"no setting changed {between}"
    return f"settings changed {between}: {'; '.join(changes)}"


def _print_fall(fall: Fall) -> None:
    emit_table(
        ("version", "value", "95 %", "draws", "like"),
        [
            (
                measured.subject,
                measured.value.value,
                _interval(measured.value),
                measured.draws,
                _like(measured),
            )
            for measured in fall.measured
        ],
    )
    emit_line()
    emit_line(fall_words(fall))


def fall_words(fall: Fall) -> str:
    """Describe where the value fell, or that it did not."""
    fell = f"{fall.fell.value:.3g} ({_interval(fall.fell)})"
    if not fall.sure:
        return f"no fall: the bad version is worse by {fell}"
    return f"the value fell by {fell}; step {fall.step} made the first bad version"


def _print_cause(explanation: Explanation, changes: Sequence[str]) -> None:
    emit_line()
    emit_table(
        ("suspect", "step", "outlier score", "deviations"),
        [
            (suspect.name, suspect.step, "; ".join(suspect.reasons), suspect.deviations)
            for suspect in explanation.suspects[:SUSPECTS_SHOWN]
        ],
    )
    emit_line()
    emit_table(
        ("without", "steps", "value", "95 %", "better by", "like"),
        [_trial_row(trial) for trial in explanation.trials],
    )
    emit_line()
    emit_line(
        f"repeated {counted(explanation.steps, 'step')} in"
        f" {counted(len(explanation.trials), 'trial')}"
    )
    emit_line(conclusion(explanation, changes))


def _trial_row(measured: Measured) -> Sequence[Any]:
    trial = measured.subject
    assert isinstance(trial, Trial)
    names = sorted(trial.drop)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    without = ", ".join(names[:NAMES_SHOWN]) + more
    gain = f"{measured.gain.value:.3g} ({_interval(measured.gain)})"
    return (
        without,
        trial.steps,
        measured.value.value,
        _interval(measured.value),
        gain,
        _like(measured),
    )


def conclusion(explanation: Explanation, changes: Sequence[str] = ()) -> str:
    """Describe the cause.

    Example: ``without g0000003871 (reward -1e+03): 0.71 -> 0.83``
    """
    if explanation.cause and explanation.proof is not None:
        named = ", ".join(_named(suspect) for suspect in explanation.cause)
        more = "; a smaller set may suffice: raise --steps" if explanation.over else ""
        return f"without {named}: {_change(explanation.proof)}{more}"
    if explanation.proof is None:
        return "no trial was made: --steps is too small, or the step has one group only"
    many = f"without all {len(explanation.suspects)} suspects {_change(explanation.proof)}"
    if explanation.proof.verdict == "open":
        return f"undecided: {many}; raise --draws"
    if changes:
        return f"no group explains the fall: {many}; `retrain --set` tries the old settings"
    return f"no group explains the fall: {many}"


def _named(suspect: Suspect) -> str:
    return f"{suspect.name} ({'; '.join(suspect.reasons)})" if suspect.reasons else suspect.name


def _change(measured: Measured) -> str:
    return f"{measured.before:.3g} -> {measured.value.value:.3g}"


def _like(measured: Measured) -> str:
    return "undecided" if measured.verdict == "open" else measured.verdict


def _interval(interval: Interval) -> str:
    return f"{show(interval.low)} to {show(interval.high)}"


def plain(fall: Fall, explanation: Explanation | None, changes: Sequence[str]) -> Mapping[str, Any]:
    """Return the result as JSON."""
    return {
        "settings": list(changes),
        "sure": fall.sure,
        "fall": msgspec.to_builtins(fall, order="sorted"),
        "cause": msgspec.to_builtins(explanation, order="sorted"),
        "conclusion": fall_words(fall) if explanation is None else conclusion(explanation, changes),
    }
