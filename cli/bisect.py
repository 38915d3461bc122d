"""`bisect`: between which versions a run went bad, and which rows did it, as tables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dora_pipe.audit.bisect import Fall, Limits, Measured, Trial, Version, search
from dora_pipe.audit.culprits import Explanation, Suspect
from dora_pipe.audit.measuring import Measuring, look_into
from dora_pipe.audit.probed_file import BisectFound, KeptSuspect, ProbedFile
from dora_pipe.catalogue.evaluations import Interval
from dora_pipe.catalogue.marks import SETTINGS
from dora_pipe.cli.output import emit_json, emit_line, emit_table, show
from dora_pipe.cli.probed_runs import SCRATCH, Subjects, probed_file
from dora_pipe.cli.probes import opened_probe
from dora_pipe.cli.progress import CommandProgress
from dora_pipe.consumers.trainer.commits import CommitHistory
from dora_pipe.consumers.trainer.recovery import read_history
from dora_pipe.core.clock import SystemClock
from dora_pipe.core.console import say
from dora_pipe.core.errors import InvariantBroken, UsageError
from dora_pipe.launch.run_dir import OpenRun

SUSPECTS_SHOWN: Final = 8
NAMES_SHOWN: Final = 3
"""Of the groups of a trial; `--json` has every one."""


def bisect_run(
    run: OpenRun,
    *,
    good: int,
    bad: int,
    probe: str,
    directory: Path | None,
    limits: Limits,
    as_json: bool,
    report: CommandProgress,
) -> None:
    """Find the versions between which the probe's value fell, and what did it; print both.

    Raises UsageError, ConfigError, TaskError, PolicyError, ReplayDiverged.
    """
    history = read_history(run.bus, run.topics, SystemClock())
    _check(history, good, bad)
    with closing(run.tables()) as tables:
        changes = [
            f"step {step}: {change}"
            for step, change in tables.query(SETTINGS)
            if good <= step < bad
        ]
    settings = settings_words(changes, good, bad)
    if settings and not as_json:
        emit_line(settings)
    with opened_probe(run, probe, directory, report) as opened:
        file = probed_file(run, history, probe, opened)
        opened.begin(file.folder / SCRATCH)
        subjects = Subjects(run, history, file.folder / SCRATCH)
        measuring = Measuring(
            probe=opened, file=file, weights=subjects.weights, told=lambda words: report(words)
        )
        kept = [at for at in range(good, bad) if subjects.is_kept(at)]
        fall = measuring.run(search(good, bad, limits, kept=kept, direction=opened.direction))
        if not as_json:
            print_fall(fall, probe, file.folder)
        found = None
        if fall.sure:
            steps = len(history.notes)
            found = look_into(fall, measuring, subjects.repeater(), limits, steps=steps)
        subjects.forget()
    lines = [settings] if settings else []
    lines += [fall_words(fall), *([] if found is None else conclusion(found, changes))]
    file.keep(_found(fall, found, lines, good=good, bad=bad))
    if as_json:
        emit_json({"settings": changes, **_plain(fall, found, file, subjects.led, changes)})
    elif found is not None:
        print_cause(found, subjects.led, changes)


def _check(history: CommitHistory, good: int, bad: int) -> None:
    if history.run_started is None:
        raise InvariantBroken("control has no `run started`")
    first, last = history.first_step, history.next_step
    if not first <= good < bad <= last:
        raise UsageError(
            f"there is nothing between version {good} and version {bad}",
            hint=f"--good is before --bad, and there are versions {first} to {last}",
        )
    if history.interruptible:
        say("note: trajectories of this run mix versions; groups are trained again as they were")


def print_fall(fall: Fall, probe: str, folder: Path) -> None:
    """Where the value fell."""
    emit_line(f"probe        {probe}, remembered in {folder}")
    emit_table(
        ("version", "value", "95 %", "draws", "like"),
        [
            (one.subject.words, one.value.value, interval(one.value), one.draws, said)
            for one, said in (
                (fall.good, "--good"),
                *((one, like(one.verdict)) for one in fall.tested),
                (fall.bad, "--bad"),
            )
        ],
    )
    emit_line()
    emit_line(fall_words(fall))


def fall_words(fall: Fall) -> str:
    """Where the value fell, or that it did not."""
    fell = f"{fall.fell.value:.3g} ({interval(fall.fell)})"
    if not fall.sure and fall.fell.high < 0:
        return f"nothing fell: {fall.bad.subject.words} is better, by {-fall.fell.value:.3g}"
    if not fall.sure:
        return f"nothing fell: the difference is {fell}, which may be none"
    if fall.undecided:
        return (
            f"the value fell by {fell}, between version {fall.last_good} and"
            f" {fall.first_bad}: those between are about halfway"
        )
    return f"the value fell by {fell}; step {fall.last_good} made the first bad version"


def settings_words(changes: Sequence[str], good: int, bad: int) -> str:
    """The settings that changed between the two versions; empty where none did."""
    if not changes:
        return ""
    return f"settings changed between version {good} and version {bad}: {'; '.join(changes)}"


def _found(
    fall: Fall, found: Explanation | None, lines: list[str], *, good: int, bad: int
) -> BisectFound:
    """What is kept of it beside the values."""
    verdicts = {one.subject.words: like(one.verdict) for one in fall.tested}
    ends = {fall.good.subject.words: "given as good", fall.bad.subject.words: "given as bad"}
    trials = () if found is None else found.trials
    return BisectFound(
        good=good,
        bad=bad,
        conclusion=lines,
        like=verdicts | ends | {one.subject.words: like(one.verdict) for one in trials},
        suspects=[
            KeptSuspect(
                name=one.name, step=one.step, deviations=one.deviations, reasons=[*one.reasons]
            )
            for one in (() if found is None else found.suspects)
        ],
    )


def print_cause(found: Explanation, led: int, changes: Sequence[str] = ()) -> None:
    """What did it, and the trials that say so."""
    emit_line()
    emit_table(
        ("suspect", "step", "stands out by", "deviations"),
        [
            (one.name, one.step, "; ".join(one.reasons), one.deviations)
            for one in found.suspects[:SUSPECTS_SHOWN]
        ],
    )
    if found.trials:
        emit_line()
        emit_table(
            ("without", "steps", "value", "95 %", "better by", "like"),
            [_trial(one, found) for one in found.trials],
        )
    emit_line()
    emit_line(
        f"trained again {found.steps} steps in {len(found.trials)} trials, {led} as they were"
    )
    for line in conclusion(found, changes):
        emit_line(line)


def _trial(one: Measured, found: Explanation) -> Sequence[Any]:
    trial = one.subject
    assert isinstance(trial, Trial)
    gain = f"{one.gain.value:.3g} ({interval(one.gain)})"
    value = one.value.value
    return (
        _names(trial.without, found),
        trial.steps,
        value,
        interval(one.value),
        gain,
        like(one.verdict),
    )


def _names(without: Collection[str], found: Explanation) -> str:
    names = [one.name for one in found.suspects if one.name in without] or sorted(without)
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def conclusion(found: Explanation, changes: Sequence[str] = ()) -> list[str]:
    """What came of it, in words.

    Example: ``without g0000003871 (7 of 8 end in the same 40-token loop, reward 1): .71 -> .83``
    """
    if not found.cause or found.proof is None:
        lines = [_nothing(found, "no group" if changes else "nothing")]
        if changes:
            settings = "; ".join(changes)
            lines.append(
                f"a changed setting may ({settings}): `dora-pipe retrain` with its old value"
            )
    else:
        named = ", ".join(_named(one) for one in found.cause)
        lines = [f"without {named}: {_change(found.proof)}"]
        if not found.smallest:
            lines.append("whether fewer of them suffice is not known: more with --steps")
        elif len(found.cause) > 1:
            lines.append("only together: without fewer of them the value stays bad")
    if found.inside is not None:
        lines.append(f"one trajectory of it suffices: {_named(found.inside)}")
    return lines


def _nothing(found: Explanation, subject: str) -> str:
    if not found.suspects:
        return f"{subject} explains the fall: the step has no group that could be left out"
    if found.proof is None:
        return "nothing was tried: the trials need more steps, --steps"
    count = len(found.suspects)
    if found.proof.verdict == "open":
        return (
            f"it cannot be told whether one of the {count} suspects did it:"
            f" without all {_change(found.proof)}; more with --draws-max"
        )
    return (
        f"{subject} explains the fall: without all {count} suspects {_change(found.proof)};"
        " more of them with --suspects, steps before with --before"
    )


def _named(one: Suspect) -> str:
    return f"{one.name} ({'; '.join(one.reasons)})" if one.reasons else one.name


def _change(one: Measured) -> str:
    return f"{one.before:.3g} -> {one.value.value:.3g}"


def like(verdict: str) -> str:
    return "cannot be told" if verdict == "open" else verdict


def interval(one: Interval) -> str:
    """Its two ends."""
    return f"{show(one.low)} to {show(one.high)}"


def _plain(
    fall: Fall, found: Explanation | None, file: ProbedFile, led: int, changes: Sequence[str]
) -> Mapping[str, Any]:
    return {
        "folder": str(file.folder),
        "fell": asdict(fall.fell),
        "sure": fall.sure,
        "last_good": fall.last_good,
        "first_bad": fall.first_bad,
        "versions": [_measured(one) for one in (fall.good, *fall.tested, fall.bad)],
        "explanation": None if found is None else _explained(found, led, changes),
    }


def _explained(found: Explanation, led: int, changes: Sequence[str]) -> Mapping[str, Any]:
    return {
        "cause": [asdict(one) for one in found.cause],
        "smallest": found.smallest,
        "inside": None if found.inside is None else asdict(found.inside),
        "proof": None if found.proof is None else _measured(found.proof),
        "suspects": [asdict(one) for one in found.suspects],
        "trials": [_measured(one) for one in found.trials],
        "steps": found.steps,
        "steps_as_they_were": led,
        "conclusion": conclusion(found, changes),
    }


def _measured(one: Measured) -> Mapping[str, Any]:
    subject = one.subject
    of = (
        {"version": subject.version}
        if isinstance(subject, Version)
        else {
            "first_step": subject.first,
            "last_step": subject.last,
            "without": sorted(subject.without),
        }
    )
    return {**of, **{key: value for key, value in asdict(one).items() if key != "subject"}}
