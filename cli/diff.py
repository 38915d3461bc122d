"""`diff`: print the first record where two runs differ, and why."""

from __future__ import annotations

from typing import Final

from dora_pipe.analysis.diff import RunDiff, diff_runs
from dora_pipe.bus.logged import Damage
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged
from dora_pipe.launch.run_dir import OpenRun

CELL: Final = 40


def print_diff(one: OpenRun, other: OpenRun, *, as_json: bool) -> None:
    """Compare two runs and print the result. Raises InvariantBroken, last, for damaged records."""
    damage = Damage()
    found = diff_runs(one, other, damage)
    if as_json:
        emit_json(found.plain())
    else:
        _print(found, (one.directory.path.name, other.directory.path.name))
    raise_if_damaged(damage, ", not compared")


def _print(found: RunDiff, names: tuple[str, str]) -> None:
    counts = ", ".join(f"{count} {_many(kind)}" for kind, count in found.compared.items())
    if not found.partings:
        emit_line(f"no difference in {counts}")
    else:
        first = found.partings[0]
        values = " | ".join(_short(value) for value in first.values)
        emit_line(f"first record   {first.kind} {first.name}: {values}")
        emit_line(f"compared       {counts}")
    for at, reason in enumerate(found.reasons(names)):
        emit_line(f"{'' if at else 'why':14} {reason}")
    if found.partings and not found.reasons(names):
        emit_line("why            no recorded setting differs: timing or numerics")
    if len(found.partings) > 1:
        emit_line()
        rows = [
            (f"{part.kind} {part.name}", *(_short(value) for value in part.values))
            for part in found.partings
        ]
        emit_table(("first that differs", *names), rows)


def _short(value: object) -> str:
    if isinstance(value, tuple):  # of a trajectory: its source, tokens and reward
        return f"tokens {value[1][:8]}, reward {value[2]}"
    return str(value)[:CELL]


def _many(kind: str) -> str:
    return {"batch": "batches", "trajectory": "trajectories"}.get(kind, f"{kind}s")
