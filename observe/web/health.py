"""Warnings of a run: `why` while it is open, sums of its tables after it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from dora_pipe.core.system.clock import SystemClock
from dora_pipe.ledger.follower import LogFollower
from dora_pipe.observe.run_stats import RunStats
from dora_pipe.observe.text import counted
from dora_pipe.observe.web.pages import RunSource
from dora_pipe.observe.web.view import RunView
from dora_pipe.observe.why import answer_of

PIECES_MAX: Final = 8

INVALID_SHARE: Final = 0.05

WarningLine = list[str]
"""Level (`bad` or `warn`), text, advice."""


class Health:
    """Warnings of a run; reads an open log once more, a few pieces per answer."""

    def __init__(self, source: RunSource) -> None:
        self._source = source
        self._stats = RunStats(source.topics.run)
        self._follower: LogFollower | None = None

    def answer(self, view: RunView) -> dict[str, Any]:
        """Return the warnings; `reading` if more follow."""
        if view.finished:
            return {"reading": False, "warnings": list(finished_warnings(view))}
        if self._follower is None:
            self._follower = self._stats.follow(self._source.bus, self._source.topics)
        more = all(self._follower.advance() for _ in range(PIECES_MAX))
        warnings = [] if more else list(open_warnings(self._stats, SystemClock().wall_ns()))
        return {"reading": more, "warnings": warnings + list(finished_warnings(view))}

    def close(self) -> None:
        if self._follower is not None:
            self._follower.close()


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
