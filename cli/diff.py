"""`diff`: where two runs part, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.audit.compared_logs import compared_logs
from dora_pipe.audit.run_diff import ComparedRun, Difference, Parting, RunDiff
from dora_pipe.bus.logged import Damage
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged
from dora_pipe.launch.run_dir import OpenRun

ROWS: Final = 10
"""Steps and versions in a table of curves; `--json` has every one."""

CELL: Final = 40
"""Characters of a value."""


def diff_runs(one: OpenRun, other: OpenRun, *, as_json: bool) -> None:
    """Print where two runs part. Raises InvariantBroken behind the rest for records that are not
    those that were logged."""
    damage = Damage()
    found = compared_logs(one, other, damage)
    if as_json:
        emit_json(found.plain())
    else:
        names = [each.directory.path.name for each in (one, other)]
        _print(found.found, found.first, found.compared, found.runs, names)
    raise_if_damaged(damage, ", and not compared")


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
