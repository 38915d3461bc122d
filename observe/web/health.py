"""Warnings of a run: `why` while it is open, sums of its tables after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dora_pipe.core.system.clock import SystemClock
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.text import counted
from dora_pipe.observe.web.view import RunView
from dora_pipe.observe.why import answer_of

INVALID_SHARE: Final = 0.05

WarningLine = list[str]
"""Level (`bad` or `warn`), text, advice."""


def health(view: RunView, stats: RunStats | None, *, reading: bool) -> dict[str, Any]:
    """Return the warnings; `stats` are those of an open run, `reading` if more follow."""
    warnings = list(finished_warnings(view))
    if stats is not None and not (view.finished or reading):
        warnings[:0] = open_warnings(stats, SystemClock().wall_ns())
    return {"reading": reading and not view.finished, "warnings": warnings}


def open_warnings(stats: RunStats, now_ns: int) -> Iterator[WarningLine]:
    """Yield the lines of `why`, and what each role waits for."""
    answer = answer_of(stats, now_ns)
    yield from (["bad", line, ""] for line in list(answer.lines())[1:])
    for role in answer.roles:
        if role.wait:
            level = "bad" if role.alarms else "warn"
            yield [level, ": ".join(filter(None, (role.line, role.end))), role.advice]


def finished_warnings(view: RunView) -> Iterator[WarningLine]:
    """Yield broken bounds, steps without an update, invalid rewards and lost roles."""
    late, none, invalid, count = view.rows(
        """select coalesce(sum(over_bound), 0)::bigint, count(*) filter (grad_norm = 0),
                  coalesce(sum(trajectories - valid), 0)::bigint,
                  coalesce(sum(trajectories), 0)::bigint from steps"""
    )[0]
    if late:
        yield ["bad", f"{counted(late, 'group')} trained above the staleness bound", "run audit"]
    if none:
        yield ["warn", f"{counted(none, 'step')} without a gradient: all advantages were 0", ""]
    if count and invalid / count > INVALID_SHARE:
        text = f"{invalid / count:.0%} of the trained trajectories have no valid reward"
        yield ["bad", text, "see the errors on the Learning tab"]
    sql = "select subject, count(*) from marks where kind = 'lost' group by all order by all"
    for role, times in view.rows(sql):
        yield ["warn", f"{role} was lost {counted(times, 'time')}", "see its log"]
