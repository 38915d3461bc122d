"""A run on one screen: how far it is, what it learned, how stale its batches were, who waited."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from dora_pipe.cli.output import draws_blocks, emit_line, emit_pairs, emit_table, terminal_columns
from dora_pipe.cli.why_tables import shown_roles
from dora_pipe.core.console import say
from dora_pipe.launch.run_dir import OpenRun
from dora_pipe.observe.run_stats import RunStats, StepStats
from dora_pipe.observe.text import duration, sparkline
from dora_pipe.observe.top import frame
from dora_pipe.observe.why.summary import RoleWaits, Summary, summarise

CURVE_MAX: Final = 60
"""Characters of the reward's curve; steps next to each other share one where there are more."""

LABEL: Final = 40
"""Columns that the curve's line needs beside the curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """A run, from its log."""

    stats: RunStats
    waits: Summary
    log: str
    state: str

    def plain(self) -> dict[str, Any]:
        """As plain values."""
        stats = self.stats
        return {
            "run": stats.run,
            "state": self.state,
            "log": self.log,
            "steps": stats.version,
            "steps_planned": stats.steps_planned,
            "rewards": [one.reward for one in stats.steps],
            "evaluation": None
            if stats.evaluation is None
            else dict(zip(("version", "reward"), stats.evaluation, strict=True)),
            "staleness": dict(staleness(stats)),
            "bound": stats.bound,
            "groups": dict(stats.fates),
            "waits": asdict(self.waits),
        }


def overview(run: OpenRun) -> Overview:
    """Read the log. Raises BusError, LogTruncated."""
    stats = RunStats(run.topics.run)
    with closing(stats.follow(run.bus, run.topics)) as follower:
        while follower.advance():
            pass
    with closing(run.tables()) as tables:
        waits = summarise(run.bus, run.topics, tables)
    return Overview(
        stats=stats,
        waits=waits,
        log=run.directory.bus_url(run.config),
        state=frame(stats, time.time_ns()).head.partition(": ")[2],
    )


def staleness(stats: RunStats) -> list[tuple[int, int]]:
    """(staleness, groups) of the steps that are remembered."""
    found: Counter[int] = Counter()
    for one in stats.steps:
        found.update(dict(one.staleness))
    return sorted(found.items())


def print_overview(found: Overview) -> None:
    """The run for people."""
    stats = found.stats
    emit_line(f"{stats.run}: {found.state}")
    emit_line()
    pairs = {"log": found.log, "task": _task(stats), "reward": _reward(list(stats.steps))}
    if stats.evaluation is not None:
        version, reward = stats.evaluation
        pairs["evaluation"] = f"{reward:.3f} of version {version}"
    pairs["staleness"] = _staleness(stats)
    fates = ", ".join(f"{count} {fate}" for fate, count in stats.fates.most_common())
    pairs["groups"] = f"{fates or 'none has ended'}; {len(stats.account.open)} open"
    pairs["steps"] = _steps(list(stats.steps))
    emit_pairs(pairs)
    emit_line()
    waits = [_waited(one) for one in shown_roles(found.waits)]
    emit_table(("role", "waited", "share", "most of it for"), waits)
    say(f"show {stats.run} STEP says more of a step, why {stats.run} of who waited")


def _waited(one: RoleWaits) -> tuple[str, str, str, str]:
    most = f"{one.waits[0][0]}: {duration(one.waits[0][1])}" if one.waits else ""
    return one.role, duration(one.waited_s), f"{one.share(one.waited_s):.0%}", most


def _task(stats: RunStats) -> str:
    config = {} if stats.started is None else stats.started.config
    groups, workers = config.get("groups", {}), config.get("workers", {})
    return (
        f"{config.get('task', {}).get('kind', '?')}, {groups.get('per_step', '?')} groups of "
        f"{groups.get('size', '?')} a step, {workers.get('count', '?')} workers"
    )


def _reward(steps: list[StepStats]) -> str:
    known = [one.reward for one in steps if one.reward is not None]
    if not known:
        return "no step yet"
    width = terminal_columns()
    room = CURVE_MAX if width is None else max(8, min(CURVE_MAX, width - LABEL))
    curve = sparkline(_shared(known, room), plain=not draws_blocks())
    return f"{known[0]:.3f} {curve} {known[-1]:.3f} at step {steps[-1].step}"


def _shared(values: list[float], most: int) -> list[float]:
    """At most so many values, each the mean of its neighbours."""
    if len(values) <= most:
        return values
    edges = [len(values) * place // most for place in range(most + 1)]
    pieces = [values[low:high] for low, high in pairwise(edges)]
    return [sum(piece) / len(piece) for piece in pieces]


def _staleness(stats: RunStats) -> str:
    found = staleness(stats)
    total = sum(count for _, count in found) or 1
    said = ", ".join(f"{value}: {count / total:.0%}" for value, count in found)
    bound = "" if stats.bound is None else f" (bound {stats.bound})"
    return f"{said or 'no step yet'}{bound}"


def _steps(steps: list[StepStats]) -> str:
    timed = [one for one in steps if one.seconds is not None]
    if not timed:
        return "none was timed"
    lasted = sum(one.seconds or 0.0 for one in timed)
    return (
        f"{duration(lasted / len(timed))} each, {sum(one.tokens for one in timed) / lasted:,.0f} "
        f"sampled tokens/s trained"
    )
