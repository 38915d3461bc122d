"""`diff`: where two runs part, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from dora_pipe.audit.run_diff import (
    ComparedRun,
    Difference,
    Parting,
    RunDiff,
    comparable,
    diff,
    difference,
    run_of,
)
from dora_pipe.bus.logged import Damage
from dora_pipe.catalogue.database import COUNTS, logged_records
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged
from dora_pipe.cli.task_again import trajectories_of
from dora_pipe.config.load import leaves
from dora_pipe.config.logged import logged_config
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.lineage import policy_after
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.wire import sha256_hex

ROWS: Final = 10
"""Steps and versions in a table of curves; `--json` has every one."""

CELL: Final = 40
"""Characters of a value."""


def diff_runs(one: OpenRun, other: OpenRun, *, as_json: bool) -> None:
    """Print where two runs part. Raises InvariantBroken behind the rest for records that are not
    those that were logged."""
    runs = [_run(each) for each in (one, other)]
    found = diff(*runs)
    damage = Damage()
    first, compared = first_difference(one, other, alike=_alike(*runs), damage=damage)
    if as_json:
        emit_json(
            {
                **asdict(found),
                "trajectory": None if first is None else asdict(first),
                "compared": compared,
                "steps": [list(each.steps) for each in runs],
                "evaluations": [
                    [[*key, reward] for key, reward in each.evaluations.items()] for each in runs
                ],
            }
        )
    else:
        names = [each.directory.path.name for each in (one, other)]
        _print(found, first, compared, runs, names)
    raise_if_damaged(damage, ", and not compared")


def _run(run: OpenRun) -> ComparedRun:
    started, _ = policy_after(run.bus, run.topics, 0)
    with closing(run.tables()) as tables:
        return run_of(tables, leaves(logged_config(started.config)))


def _alike(one: ComparedRun, other: ComparedRun) -> bool:
    """Whether equal weights ought to give equal tokens."""

    def settings(run: ComparedRun) -> dict[str, Any]:
        keys = (key for key in run.config if key.split(".")[0] in ("sampling", "evaluation"))
        return {key: run.config[key] for key in keys} | {"seed": run.made_of["seed"]}

    return settings(one) == settings(other)


def first_difference(
    one: OpenRun, other: OpenRun, *, alike: bool, damage: Damage
) -> tuple[Difference | None, int]:
    """The first trajectory, training before evaluations and then by ordinal, that both runs sampled
    under the same weights and that differs; and how many were compared."""
    marks = {each.trajectory: _mark(each) for each in _counting(one, damage)}
    compared, names = 0, list[str]()
    for each in _counting(other, damage):
        mark, own = marks.get(each.trajectory), _mark(each)
        if mark is not None and mark[0] == own[0]:
            compared += 1
            if mark != own:
                names.append(each.trajectory)
    if not names:
        return None, compared
    name = min(names, key=_order)
    here, there = (next(_counting(run, Damage(), name)) for run in (one, other))
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


def _counting(run: OpenRun, damage: Damage, name: str = "") -> Iterator[Trajectory]:
    """The records of a run that count, or that of one trajectory."""
    where = f"{COUNTS} and trajectory_id = ?" if name else COUNTS
    with closing(run.tables()) as tables:
        left = logged_records(tables, where, [name] if name else [])
    yield from trajectories_of(run, left, damage)


def _print(
    found: RunDiff,
    first: Difference | None,
    compared: int,
    runs: Sequence[ComparedRun],
    names: Sequence[str],
) -> None:
    for what, pairs in (("configuration", found.config), ("made of", found.made_of)):
        emit_line(f"{what:14} {len(pairs)} differ" if pairs else f"{what:14} the same")
    emit_line(f"{'versions':14} {_parting(found.versions, 'version')}")
    emit_line(f"{'dispatched':14} {_parting(found.dispatched, 'group')}")
    emit_line(f"{'batches':14} {_parting(found.batches, 'step')}")
    emit_line(f"{'trajectories':14} {_first(first, compared)}")
    for title, pairs in (("key", found.config), ("made of", found.made_of)):
        _pairs(title, pairs, names)
    _curves(runs, names)


def _parting(one: Parting, what: str) -> str:
    lengths = f"{one.of[0]} and {one.of[1]}"
    if one.at is None:
        return f"the same {one.of[0]}"
    if None in one.values:
        return f"the same as far as both go ({lengths})"
    return f"the same before {what} {one.at} of {lengths}"


def _first(first: Difference | None, compared: int) -> str:
    if not compared:
        return "none was sampled by both under the same weights"
    if first is None:
        return f"the same {compared} of those sampled under the same weights"
    where = "" if first.place is None else f" at token {first.place}"
    return (
        f"{first.trajectory} is the first of {compared} that differs{where}: {first.cause},"
        f" {first.words}"
    )


def _pairs(title: str, pairs: Mapping[str, tuple[Any, Any]], names: Sequence[str]) -> None:
    if pairs:
        emit_line()
        rows = [(key, *(str(value)[:CELL] for value in both)) for key, both in pairs.items()]
        emit_table((title, *names), rows)


def _curves(runs: Sequence[ComparedRun], names: Sequence[str]) -> None:
    one, other = ({step: rest for step, *rest in run.steps} for run in runs)
    steps = sorted(one.keys() & other.keys())
    if steps:
        emit_line()
        heads = ("reward", "seconds", "staleness")
        emit_table(
            ("step", *(f"{head} {name}" for head in heads for name in names)),
            [
                (
                    step,
                    *(value for pair in zip(one[step], other[step], strict=True) for value in pair),
                )
                for step in _some(steps)
            ],
        )
    both = sorted(runs[0].evaluations.keys() & runs[1].evaluations.keys())
    if both:
        emit_line()
        emit_table(
            ("evaluation", "version", *names),
            [(*key, *(run.evaluations[key] for run in runs)) for key in _some(both)],
        )


def _some(found: Sequence[Any]) -> Sequence[Any]:
    """Evenly spread, the first and the last among them."""
    if len(found) <= ROWS:
        return found
    return [found[round(at * (len(found) - 1) / (ROWS - 1))] for at in range(ROWS)]
