"""Two runs held against each other by their logs: what `run_diff` compares is read here, the same
for the terminal and the pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import msgspec
import numpy as np

from dora_pipe.audit.reading import OpenLog, trajectories_of
from dora_pipe.audit.run_diff import (
    ComparedRun,
    Difference,
    RunDiff,
    comparable,
    diff,
    difference,
    run_of,
)
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, Catalogue, logged_records
from dora_pipe.config.load import leaves
from dora_pipe.config.logged import logged_config
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import sha256_hex

Told = Callable[[int], None]
"""Hears how many trajectories of both runs were read so far."""


class LogWithTables(OpenLog, Protocol):
    """An open log whose catalogue can be had."""

    def tables(self) -> Catalogue:
        """To be closed."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedLogs:
    """Where two runs part, and what of each was compared."""

    runs: tuple[ComparedRun, ComparedRun]
    found: RunDiff
    first: Difference | None
    """The first trajectory that comes out otherwise under equal weights."""
    compared: int
    """Trajectories that both sampled under equal weights."""

    @property
    def words(self) -> dict[str, str]:
        """In a line each what is the same, and up to where."""
        found = self.found

        def count(pairs: Mapping[str, Any]) -> str:
            return f"{len(pairs)} differ" if pairs else "the same"

        return {
            "settings": found.settings,
            "configuration": count(found.config),
            "made of": count(found.made_of),
            "versions": found.versions.words("version"),
            "dispatched": self._dispatched_words(),
            "batches": found.batches.words("step"),
            "trajectories": self._first_words(),
        }

    def _dispatched_words(self) -> str:
        one, other = (run.borrows for run in self.runs)
        if one and other:
            return "neither has groups of its own: both were trained again"
        if one or other:
            who = "the first" if one else "the other"
            return f"{who} has no groups of its own: it was trained again"
        return self.found.dispatched.words("group")

    def _first_words(self) -> str:
        first, compared = self.first, self.compared
        if not compared:
            return "none was sampled by both under the same weights"
        if first is None:
            return f"the same {compared} of those sampled under the same weights"
        where = "" if first.place is None else f" at token {first.place}"
        return (
            f"{first.trajectory} is the first of {compared} that differs{where}: {first.cause},"
            f" {first.words}"
        )

    def plain(self) -> dict[str, Any]:
        return {
            **asdict(self.found),
            "trajectory": None if self.first is None else asdict(self.first),
            "compared": self.compared,
            "steps": [list(each.steps) for each in self.runs],
            "evaluations": [
                [[*key, reward] for key, reward in each.evaluations.items()] for each in self.runs
            ],
        }


def compared_logs(
    one: LogWithTables, other: LogWithTables, damage: Damage, told: Told = lambda read: None
) -> ComparedLogs:
    """Read both from end to end. Raises BusError, LogTruncated."""
    runs = (_run(one), _run(other))
    first, compared = _first_difference(one, other, alike=_alike(*runs), damage=damage, told=told)
    return ComparedLogs(runs=runs, found=diff(*runs), first=first, compared=compared)


def _run(log: LogWithTables) -> ComparedRun:
    with closing(log.tables()) as tables:
        ((config,),) = tables.query("select config from runs")
        return run_of(tables, leaves(logged_config(msgspec.json.decode(config))))


def _alike(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether equal weights ought to give equal tokens."""

    def settings(run: ComparedRun) -> dict[str, Any]:
        keys = (key for key in run.config if key.split(".")[0] in ("sampling", "evaluation"))
        return {key: run.config[key] for key in keys} | {"seed": run.made_of["seed"]}

    return settings(one) == settings(other)


def _first_difference(
    one: LogWithTables, other: LogWithTables, *, alike: bool, damage: Damage, told: Told
) -> tuple[Difference | None, int]:
    """The first trajectory, training before evaluations and then by ordinal, that both runs sampled
    under the same weights and that differs; and how many were compared."""
    marks: dict[str, tuple[Any, ...]] = {}
    for each in _counting(one, damage):
        marks[each.trajectory] = _mark(each)
        told(len(marks))
    compared, names = 0, list[str]()
    for read, each in enumerate(_counting(other, damage), len(marks) + 1):
        mark, own = marks.get(each.trajectory), _mark(each)
        if mark is not None and mark[0] == own[0]:
            compared += 1
            if mark != own:
                names.append(each.trajectory)
        told(read)
    if not names:
        return None, compared
    name = min(names, key=_order)
    here, there = (next(_counting(log, Damage(), name)) for log in (one, other))
    assert comparable(here, there)
    return difference(here, there, alike=alike), compared


def _order(name: str) -> tuple[bool, int, int]:
    purpose, ordinal, sibling = parse_trajectory_id(name)
    return purpose == "eval", ordinal, sibling


def _mark(one: Trajectory) -> tuple[tuple[Any, ...], str, float | None]:
    """What it was sampled from, a digest of its tokens, and its reward."""
    meta = one.meta
    tokens = np.asarray(one.token_ids, "<i8").tobytes()
    return (one.digest, meta.purpose, meta.index, meta.source), sha256_hex(tokens), one.reward


def _counting(log: LogWithTables, damage: Damage, name: str = "") -> Iterator[Trajectory]:
    """The records of a run that count, or that of one trajectory."""
    where = f"{COUNTS} and trajectory_id = ?" if name else COUNTS
    with closing(log.tables()) as tables:
        left = logged_records(tables, where, [name] if name else [])
    yield from trajectories_of(log, left, damage)
