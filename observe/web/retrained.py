"""A run that was trained again beside its source, for a page: what is otherwise, and every step's
figures of both. It decides how many names a page has.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from dora_pipe.audit.compared_logs import LogWithTables
from dora_pipe.audit.rescored_run import counting_rewards, rescored_files
from dora_pipe.bus.lent_topic import lent_topic
from dora_pipe.catalogue.database import Catalogue
from dora_pipe.catalogue.lent_groups import ChangedRows, decode_changed_rows
from dora_pipe.core.errors import DoraError, UsageError
from dora_pipe.observe.lineage import policy_after
from dora_pipe.observe.web.view import marks_of, short
from dora_pipe.schemas.control import Retrained

ROWS_MAX: Final = 200
"""Rows that do not count, and weights, that a page names."""

FIGURES: Final = ("loss", "grad_norm", "ratio_mean", "clipped_share", "kl", "reward")
"""Of a step, here and there; the mean reward is that of what counts."""

_STEPS: Final = """
    select step, reward, figures, compute_s, digest_after from steps
    where step between ? and ? order by step"""


class HasPath(Protocol):
    """A run's directory."""

    @property
    def path(self) -> Path: ...


class RunBeside(LogWithTables, Protocol):
    """An open run with its directory."""

    @property
    def directory(self) -> HasPath: ...


Pair = tuple[RunBeside, RunBeside]


def retrained_page(pair: Pair) -> dict[str, Any]:
    """The two runs, in whichever order, one of which was trained again on the other's steps.

    Raises UsageError for two that have nothing to do with each other, the errors of either log.
    """
    own, other = pair
    for run, source in ((own, other), (other, own)):
        retrained = policy_after(run.bus, run.topics, 0)[0].retrained
        if retrained is not None and retrained.run == source.topics.run:
            return _page(run, source, retrained)
    raise UsageError(f"neither {own.topics.run} nor {other.topics.run} was trained on the other")


def _page(run: RunBeside, source: RunBeside, retrained: Retrained) -> dict[str, Any]:
    change = _change(run, retrained)
    with closing(run.tables()) as tables, closing(source.tables()) as theirs:
        here, there = _steps(tables, retrained), _steps(theirs, retrained)
        scored = _rescored(theirs, source.directory.path, change)
        differ = _differ(theirs, change)
        marks = marks_of(theirs, 0, f"{source.topics.run}: ")
    others = [at for at in here if at in there and here[at]["weights"] != there[at]["weights"]]
    return {
        "run": run.topics.run,
        "source": source.topics.run,
        "marks": marks,
        "facts": {
            "trained again": f"steps {retrained.first} to {retrained.last} of {source.topics.run}",
            "batches": "the source's" if retrained.rounds is None else "taken again",
            "first other step": f"step {others[0]}" if others else "none: every step is the same",
            "another reward": f"{differ} trajectories, of {len(change.rewards)} that were rescored"
            if change.rewards
            else "none",
            "rescored": " or ".join(scored) or None,
            "left out": f"{len(change.without)} rows",
            "weighed": f"{len(change.weights)} trajectories",
        },
        "settings": {
            "columns": ["setting", "here"],
            "rows": [[key, str(value)] for key, value in sorted(retrained.settings.items())],
        },
        "without": {
            "columns": ["left out"],
            "rows": [[one] for one in change.without[:ROWS_MAX]],
            "of": len(change.without),
        },
        "weights": {
            "columns": ["trajectory", "weight"],
            "rows": [[name, one] for name, one in sorted(change.weights.items())[:ROWS_MAX]],
            "of": len(change.weights),
        },
        "curves": {
            "step": list(here),
            **{
                name: [[short(of.get(at, {}).get(name)) for at in here] for of in (here, there)]
                for name in FIGURES
            },
        },
        "steps": _table(here, there, run.topics.run, source.topics.run),
    }


def _change(run: LogWithTables, retrained: Retrained) -> ChangedRows:
    log = lent_topic(run.bus)
    if retrained.change is None or log is None or log.change is None:
        return ChangedRows()
    return decode_changed_rows(log.change(retrained.change.sha256))


def _steps(tables: Catalogue, retrained: Retrained) -> dict[int, dict[str, Any]]:
    rows = tables.query(_STEPS, [retrained.first, retrained.last])
    return {
        step: {
            **msgspec.json.decode(figures),
            "reward": reward,
            "compute s": compute_s,
            "weights": digest,
        }
        for step, reward, figures, compute_s, digest in rows
    }


def _table(
    here: Mapping[int, Mapping[str, Any]],
    there: Mapping[int, Mapping[str, Any]],
    run: str,
    source: str,
) -> dict[str, Any]:
    names = (*FIGURES, "compute s")
    rows = []
    for step, own in here.items():
        theirs = there.get(step, {})
        both = [short(of.get(name)) for name in names for of in (own, theirs)]
        alike = "the same" if own["weights"] == theirs.get("weights") else "other"
        rows.append([step, alike, *both])
    heads = [f"{name}, {of}" for name in names for of in (run, source)]
    return {"columns": ["step", "weights", *heads], "rows": rows}


def _differ(tables: Catalogue, change: ChangedRows) -> int:
    """Trajectories whose reward is another one than in the source."""
    sql = "select trajectory_id, reward from trajectories where trajectory_id in (select unnest(?))"
    theirs = dict(tables.query(sql, [list(change.rewards)]))
    return sum(theirs.get(name) != one for name, one in change.rewards.items())


def _rescored(tables: Catalogue, directory: Path, change: ChangedRows) -> list[str]:
    """Whose rewards these are: the names of the folders in the source's directory that say just
    this."""
    names: list[str] = []
    for file in rescored_files(directory) if change.rewards else ():
        try:
            found = counting_rewards(file, file.about(), tables)
        except DoraError:
            continue  # it cannot be read, and the source's page says so
        if all(name in found and found[name].reward == one for name, one in change.rewards.items()):
            names.append(file.folder.name)
    return names
