"""`diff`: where two runs part, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.audit.compared_logs import ComparedLogs, compared_logs
from dora_pipe.audit.run_diff import ComparedRun
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
        _print(found, names)
    raise_if_damaged(damage, ", and not compared")


def _print(found: ComparedLogs, names: Sequence[str]) -> None:
    for what, words in found.words.items():
        emit_line(f"{what:14} {words}")
    for title, pairs in (("key", found.found.config), ("made of", found.found.made_of)):
        _pairs(title, pairs, names)
    _curves(found.runs, names)


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
