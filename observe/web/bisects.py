"""What `bisect` has left in a run's directory, on a page: values by version with their intervals,
suspects, and trials without them. It decides what of a long list a page has.

Nothing here writes or measures: of a command that still goes on, what it has asked so far is there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from dora_pipe.audit.probed_file import FOLDER, AboutProbe, BisectFound, ProbedFile
from dora_pipe.catalogue.evaluations import Interval, interval_of
from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.observe.web.view import short

NAMES_SHOWN: Final = 3
"""Of the groups of a trial."""

LISTED: Final = ("bisect", "probe", "versions", "trials", "what came of it")

_VERSION: Final = re.compile(r"^version (\d+)$")
_TRIAL: Final = re.compile(r"^steps (\d+) to (\d+)(?: without (.+)| as they were)$")


def bisect_files(directory: Path) -> list[ProbedFile]:
    """The probes that a run's directory has values of, a folder each."""
    return [ProbedFile(one.parent) for one in sorted((directory / FOLDER).glob("*/about.json"))]


def listed_bisects(directory: Path, problems: list[str]) -> dict[str, Any]:
    """A row for each; what cannot be read is among the problems."""
    rows: list[list[Any]] = []
    for file in bisect_files(directory):
        try:
            about, found = _read(file)
        except DoraError as error:
            problems.append(error.message)
            continue
        versions = sum(_VERSION.match(one) is not None for one in file.known)
        said = found.conclusion[0] if found and found.conclusion else None
        name, trials = file.folder.name, len(file.known) - versions
        rows.append([name, about.probe, versions, trials, said])
    return {"columns": list(LISTED), "rows": rows}


def bisect_page(directory: Path, name: str, marks: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """Everything of one probe; `marks` are the run's. Raises UsageError, ResourceError."""
    file = _file(directory, name)
    about, found = _read(file)
    return {
        "id": name,
        "probe": about.probe,
        "marks": list(marks),
        "facts": {
            "probe": about.probe,
            "its code": about.digest[:12],
            "sampled by": about.engine or None,
            **({} if found is None else {"good": f"v{found.good}", "bad": f"v{found.bad}"}),
        },
        "conclusion": [] if found is None else found.conclusion,
        "versions": _versions(file, found),
        "suspects": {
            "columns": ["subject", "step", "stands out by", "deviations"],
            "rows": [
                [one.name, one.step, "; ".join(one.reasons), short(one.deviations)]
                for one in (() if found is None else found.suspects)
            ],
        },
        "trials": _trials(file, found),
    }


def bisect_stamp(directory: Path, name: str) -> tuple[int, ...]:
    """Changes whenever the page does. Raises UsageError."""
    return _file(directory, name).stamp


def _file(directory: Path, name: str) -> ProbedFile:
    files = bisect_files(directory)
    for one in files:
        if one.folder.name == name:
            return one
    there = ", ".join(one.folder.name for one in files) or "none"
    raise UsageError(f"no probe {name!r} was asked of this run", hint=f"there are: {there}")


def _read(file: ProbedFile) -> tuple[AboutProbe, BisectFound | None]:
    about = file.about()
    file.read()
    return about, file.found()


def _versions(file: ProbedFile, found: BisectFound | None) -> dict[str, Any]:
    rows: list[list[Any]] = []
    for words, values in file.known.items():
        if (at := _VERSION.match(words)) and (own := _interval(values)):
            rows.append([int(at[1]), *_ends(own), len(values), _verdict(words, found)])
    columns = ["version", "value", "low", "high", "draws", "like"]
    return {"columns": columns, "rows": sorted(rows)}


def _trials(file: ProbedFile, found: BisectFound | None) -> dict[str, Any]:
    """In the order in which they were made."""
    rows: list[list[Any]] = []
    for words, values in file.known.items():
        trial, own = _TRIAL.match(words), _interval(values)
        if trial is None or own is None:
            continue
        first, last, without = trial.groups()
        steps = f"{first} to {last}" if first != last else first
        rows.append(
            [_names(without, found), steps, *_ends(own), len(values), _verdict(words, found)]
        )
    return {"columns": ["without", "steps", "value", "low", "high", "draws", "like"], "rows": rows}


def _names(without: str | None, found: BisectFound | None) -> str:
    """Those that stand out most first, as the suspects are."""
    if without is None:
        return "nothing: as they were"
    names = without.split(", ")
    ranked = [one.name for one in (() if found is None else found.suspects) if one.name in names]
    names = ranked + [one for one in names if one not in ranked]
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


def _interval(values: Sequence[float | None]) -> Interval | None:
    there = [one for one in values if one is not None]
    return interval_of(there) if there else None


def _ends(one: Interval) -> list[float | None]:
    return [short(one.value), short(one.low), short(one.high)]


def _verdict(words: str, found: BisectFound | None) -> str | None:
    return None if found is None else found.like.get(words)
