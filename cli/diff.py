"""`diff`: print the first record where two runs differ, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final

import typer

from dora_pipe.analysis.diff import Parting, RunDiff, diff_runs
from dora_pipe.bus.logged import Damage
from dora_pipe.cli.options import JsonOption, RunArgument, RunsOption
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged
from dora_pipe.core.system.console import RUNS
from dora_pipe.launch.run_dir import opened

CELL: Final = 40

GROUPS_SHOWN: Final = 2


def diff(
    run: RunArgument,
    other: Annotated[str, typer.Argument(metavar="OTHER", help="The other run.")],
    as_json: JsonOption = False,
    root: RunsOption = RUNS,
) -> None:
    """Find the first record in which two runs differ, and the cause: changed settings, keys,
    seeds, versions or code.
    """
    damage = Damage()
    with opened(run, root) as first, opened(other, root) as second:
        runs_diff = diff_runs(first, second, damage)
    if as_json:
        emit_json(runs_diff.plain())
    else:
        print_diff(runs_diff, (first.directory.path.name, second.directory.path.name))
    raise_if_damaged(damage, ", not compared")


def print_diff(diff: RunDiff, names: tuple[str, str]) -> None:
    counts = ", ".join(f"{count} {_many(kind)}" for kind, count in diff.compared.items())
    if not diff.partings:
        emit_line(f"no difference in {counts}")
    else:
        first = diff.partings[0]
        values = " | ".join(_values(first))
        emit_line(f"first record   {first.kind} {first.name}: {values}")
        emit_line(f"compared       {counts}")
    for index, reason in enumerate(diff.reasons(names)):
        emit_line(f"{'' if index else 'why':14} {reason}")
    if diff.partings and not diff.reasons(names):
        emit_line("why            no recorded setting differs: timing or numerics")
    if len(diff.partings) > 1:
        emit_line()
        rows = [(f"{part.kind} {part.name}", *_values(part)) for part in diff.partings]
        emit_table(("first that differs", *names), rows)


def _values(part: Parting) -> tuple[str, str]:
    first, other = part.values
    if part.kind == "batch":
        return _only_in(first.split(), other.split()), _only_in(other.split(), first.split())
    return _short(first), _short(other)


def _only_in(groups: Sequence[str], excluded: Sequence[str]) -> str:
    own = [group for group in groups if group not in excluded]
    more = f" and {len(own) - GROUPS_SHOWN} more" if len(own) > GROUPS_SHOWN else ""
    return f"with {' '.join(own[:GROUPS_SHOWN])}{more}" if own else "with no other group"


def _short(value: object) -> str:
    if isinstance(value, tuple):  # of a trajectory: its source, tokens and reward
        return f"tokens {value[1][:8]}, reward {value[2]}"
    return str(value)[:CELL]


def _many(kind: str) -> str:
    return {"batch": "batches", "trajectory": "trajectories"}.get(kind, f"{kind}s")
