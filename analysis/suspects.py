"""Rank the groups of a step by their largest deviation from the others.

A deviation is the distance above the step's median in robust standard deviations. Unbounded
measures use logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p
from statistics import fmean, median
from typing import Any, Final

STANDS_OUT: Final = 3.0
"""Reported from this many standard deviations."""

MAD_TO_STD: Final = 1.4826
"""Ratio to the median absolute deviation, for a normal distribution."""

MEAN_TO_STD: Final = 1.2533
"""Ratio to the mean absolute deviation, if most groups are equal."""

SHARE_MIN: Final = 1e-6
"""Lower bound for loss shares."""

DEVIATIONS_MIN: Final = 0.1
"""Deviations of a group that is no outlier."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    name: str
    step: int
    deviations: float
    reasons: Sequence[str] = ()

    @property
    def weight(self) -> float:
        return 1.0 + self.deviations**2


@dataclass(frozen=True, slots=True)
class _Measure:
    """`value` gets rows and the step's median reward; `shown` is for people."""

    value: Callable[[Rows, float], float]
    shown: Callable[[Rows], float]
    spread_min: float
    """Smaller differences do not count."""


def _most(rows: Rows, column: str, default: float = 0.0) -> float:
    values = (row[column] for row in rows if row.get(column) is not None)
    return float(max(values, key=abs, default=default))


def _share(rows: Rows) -> float:
    return float(sum(abs(row.get("loss_share") or 0.0) for row in rows))


def _far(rows: Rows, middle: float) -> float:
    rewards = (row["reward"] for row in rows if row["reward"] is not None)
    return float(max((abs(reward - middle) for reward in rewards), default=0.0))


def _length(rows: Rows) -> float:
    return fmean(row["tokens"] for row in rows)


MEASURES: Final[Mapping[str, _Measure]] = {
    "reward": _Measure(lambda rows, m: log1p(_far(rows, m)), lambda r: _most(r, "reward"), 0.1),
    "loss share": _Measure(lambda rows, _: log(max(_share(rows), SHARE_MIN)), _share, 0.5),
    "ratio": _Measure(
        lambda rows, _: log(max(_most(rows, "ratio_max", 1.0), 1.0)),
        lambda rows: _most(rows, "ratio_max", 1.0),
        0.1,
    ),
    "tokens": _Measure(lambda rows, _: log1p(_length(rows)), _length, 0.2),
    "advantage": _Measure(
        lambda rows, _: log1p(abs(_most(rows, "advantage"))),
        lambda rows: _most(rows, "advantage"),
        0.2,
    ),
}


def suspects_of(steps: Mapping[int, Rows], most: int) -> list[Suspect]:
    """Return the groups that deviate most within their steps; a step keeps at least one group."""
    suspects: list[Suspect] = []
    for step, rows in steps.items():
        suspects += sorted(_ranked(step, rows), key=_order)[:-1]
    return sorted(suspects, key=_order)[:most]


def _order(suspect: Suspect) -> tuple[float, str]:
    return -suspect.deviations, suspect.name


def _ranked(step: int, rows: Rows) -> list[Suspect]:
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    rewards = [row["reward"] for row in rows if row["reward"] is not None]
    middle = median(rewards) if rewards else 0.0
    far: dict[str, dict[str, float]] = {group: {} for group in groups}
    for name, measure in MEASURES.items():
        values = [measure.value(own, middle) for own in groups.values()]
        for group, deviation in zip(groups, deviations(values, measure.spread_min), strict=True):
            far[group][name] = deviation
    return [
        Suspect(
            name=group,
            step=step,
            deviations=max(*far[group].values(), DEVIATIONS_MIN),
            reasons=tuple(
                f"{name} {MEASURES[name].shown(own):.3g}"
                for name, deviation in sorted(far[group].items(), key=lambda item: -item[1])
                if deviation >= STANDS_OUT
            ),
        )
        for group, own in groups.items()
    ]


def deviations(values: Sequence[float], spread_min: float) -> list[float]:
    """Return robust standard deviations above the median; 0 below."""
    middle = median(values)
    far = [abs(value - middle) for value in values]
    scale = max(MAD_TO_STD * median(far) or MEAN_TO_STD * fmean(far), spread_min)
    return [max(0.0, (value - middle) / scale) for value in values]
