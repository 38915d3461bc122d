"""A step of a run on one screen: what it was made of, its figures, its worst ratios."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.audit.describe import DAMAGE, Story
from dora_pipe.cli.output import emit_flow, emit_line, emit_table, flow, show, terminal_rows
from dora_pipe.core.console import say

WORST: Final = 5
"""Trajectories with the largest ratios that are listed."""

LINES_ELSE: Final = 3 + 1 + 2 + 1
"""What the step is, the title of the groups, what is said behind it, and the next prompt."""

GAPS: Final = 4
"""Empty lines between the parts, where the screen is high enough for them."""

GROUP_LINES_MIN: Final = 3
"""Of the groups: for less, rather no gaps."""

FIGURES: Final = (
    *("reward_mean", "loss", "grad_norm", "ratio_mean", "ratio_min", "ratio_max", "clipped_share"),
    *("kl", "tokens", "updates", "staleness_mean", "without_gradient"),
)
"""Those that are shown; --all has every one."""


def is_step(story: Story) -> bool:
    """Whether a story is that of a step."""
    return "figures" in story


def print_step(story: Story, run: str) -> None:
    """The step, so that it fits; `--all` is the whole story."""
    step, groups, rows = story["step"], story["groups"], story["trajectories"]
    figures = story["figures"]
    count = f"{figures.get('trajectories', len(rows)):.0f}"
    emit_line(
        f"step {step['step']} of {run}: {len(groups)} groups, {count} trajectories, attempt "
        f"{step['attempt']}, computed in {show(step['compute s'])} s"
    )
    emit_line(f"taken because {step['why then']}")
    emit_line(f"weights {str(story['weights']['after']).rpartition(' ')[2]}")
    told = flow([f"{name} {show(figures[name])}" for name in FIGURES if name in figures])
    versions, worst = _by_version(groups), _worst(rows)
    named = flow([f"{one['group']} {show(_mean(_rewards(one)))}" for one in groups])
    taken = LINES_ELSE + len(told) + 1 + len(versions) + 2 + len(worst)
    room, gaps = _room(taken, len(named))
    _part(gaps)
    emit_flow(told)
    _part(gaps)
    _print_versions(versions)
    _part(gaps)
    _print_groups(named[:room], len(groups))
    _part(gaps)
    _print_worst(worst)
    if DAMAGE not in story:
        say("--all has every trajectory, the settings, the lineage and the trace")


def _part(gap: bool) -> None:
    if gap:
        emit_line()


def _room(taken: int, wanted: int) -> tuple[int | None, bool]:
    """How many lines the groups may have, None where nobody counts them; whether there are gaps."""
    height = terminal_rows()
    if height is None:
        return None, True
    left = height - taken - GAPS
    if left >= min(GROUP_LINES_MIN, wanted):
        return left, True
    return max(1, left + GAPS), False


def _by_version(groups: Sequence[Mapping[str, Any]]) -> list[tuple[Any, ...]]:
    found: dict[int, list[Mapping[str, Any]]] = {}
    for one in groups:
        if "version" in one:
            found.setdefault(one["version"], []).append(one)
    return [
        (
            version,
            of[0]["staleness"],
            len(of),
            _mean([reward for one in of for reward in _rewards(one)]),
            sum(one["tokens"] for one in of),
        )
        for version, of in sorted(found.items())
    ]


def _print_versions(rows: Sequence[tuple[Any, ...]]) -> None:
    emit_table(("sampled by version", "staleness", "groups", "mean reward", "tokens"), rows)


def _print_groups(lines: Sequence[Sequence[str]], count: int) -> None:
    """Names with their mean rewards, as many as the screen has room for."""
    shown = sum(map(len, lines))
    which = "" if shown == count else f" ({shown} of {count}; --all has every one)"
    emit_line(f"groups and their mean rewards{which}")
    emit_flow(lines)


def _worst(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Trajectories whose probability of a token changed most since they were sampled."""
    return sorted((one for one in rows if _size(one)), key=_size, reverse=True)[:WORST]


def _print_worst(worst: Sequence[Mapping[str, Any]]) -> None:
    columns = ("trajectory", "version", "reward", "advantage", "tokens", "ratio_min", "ratio_max")
    emit_table(
        (*columns, "clipped_share"),
        [[one.get(name) for name in (*columns, "clipped_share")] for one in worst],
        title=f"the {len(worst)} trajectories with the worst ratios"
        if worst
        else "ratios: the contributions file of the step is not in the store",
        drop=("clipped_share", "version", "tokens"),
    )


def _size(row: Mapping[str, Any]) -> float:
    """How far the farthest ratio is from 1, in nats."""
    ratios = [row.get("ratio_min"), row.get("ratio_max")]
    return max((abs(math.log(one)) for one in ratios if one), default=0.0)


def _rewards(group: Mapping[str, Any]) -> list[float]:
    return [float(one) for one in str(group.get("rewards", "")).split() if one != "-"]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
