"""`diff`: print the first record where two runs differ, and why."""

from __future__ import annotations

from typing import Final

from dora_pipe.analysis.diff import RunDiff, diff_runs
from dora_pipe.bus.logged import Damage
from dora_pipe.cli.output import emit_json, emit_line, emit_table, raise_if_damaged
from dora_pipe.launch.run_dir import OpenRun

CELL: Final = 40


def print_diff(run: OpenRun, other: OpenRun, *, as_json: bool) -> None:
    """Compare two runs and print the result. Raises InvariantBroken, last, for damaged records."""
    damage = Damage()
    diff = diff_runs(run, other, damage)
    if as_json:
        emit_json(diff.plain())
    else:
        _print(diff, (run.directory.path.name, other.directory.path.name))
    raise_if_damaged(damage, ", not compared")


def _print(diff: RunDiff, names: tuple[str, str]) -> None:
    counts = ", ".join(f"{count} {_many(kind)}" for kind, count in diff.compared.items())
    if not diff.partings:
        emit_line(f"no difference in {counts}")
    else:
        first = diff.partings[0]
        values = " | ".join(_short(value) for value in first.values)
        emit_line(f"first record   {first.kind} {first.name}: {values}")
        emit_line(f"compared       {counts}")
    for index, reason in enumerate(diff.reasons(names)):
        emit_line(f"{'' if index else 'why':14} {reason}")
    if diff.partings and not diff.reasons(names):
        emit_line("why            no recorded setting differs: timing or numerics")
    if len(diff.partings) > 1:
        emit_line()
        rows = [
            (f"{part.kind} {part.name}", *(_short(value) for value in part.values))
            for part in diff.partings
        ]
        emit_table(("first that differs", *names), rows)


def _short(value: object) -> str:
    if isinstance(value, tuple):  # of a trajectory: its source, tokens and reward
        return f"tokens {value[1][:8]}, reward {value[2]}"
    return str(value)[:CELL]


def _many(kind: str) -> str:
    return {"batch": "batches", "trajectory": "trajectories"}.get(kind, f"{kind}s")
