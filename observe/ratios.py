"""Importance ratios of a step's trajectories, from its contributions file."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Contributions = Callable[[str], Iterable[Mapping[str, Any]]]
"""Reader of a contributions file by sha256; empty if unreadable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contributed:
    """Ratio metrics of a step; see docs/reference/metrics.md."""

    step: int
    effective: float | None
    """Effective sample size divided by the number of trajectories, 0 to 1."""
    mismatch: tuple[tuple[int, float], ...]
    """(staleness, mean of |ln(mean ratio)| over its trajectories)."""


def contributed(step: int, rows: Iterable[Mapping[str, Any]]) -> Contributed:
    """Return the metrics of these rows.

    The weight of a trajectory is its mean token ratio, trained policy to sampler.
    """
    rated = with_ratio(rows)
    weights = [row["ratio_mean"] for row in rated]
    squares = math.fsum(weight * weight for weight in weights)
    effective = math.fsum(weights) ** 2 / (len(weights) * squares) if weights else None
    logs = {stale: [distance(row) for row in own] for stale, own in by_staleness(rated).items()}
    mismatch = ((stale, sum(own) / len(own)) for stale, own in logs.items())
    return Contributed(step=step, effective=effective, mismatch=tuple(mismatch))


def with_ratio(rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["ratio_mean"] is not None and row["ratio_mean"] > 0]


def distance(row: Mapping[str, Any]) -> float:
    """Return |ln(mean ratio)| of a trajectory."""
    return abs(math.log(row["ratio_mean"]))


def by_staleness(rows: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Group rows by staleness, ascending."""
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["staleness"], []).append(row)
    return dict(sorted(groups.items()))
