"""What a step's contributions say of its ratios; it decides which trajectories have one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from dora_pipe.telemetry.tally import Contributed


def contributed(step: int, rows: Iterable[Mapping[str, Any]]) -> Contributed:
    """From the rows of a contributions file; trajectories without a gradient have no ratio.

    The weight of a trajectory is its mean ratio, trained policy to sampler, over its tokens.
    """
    weights: list[float] = []
    logs: dict[int, list[float]] = {}
    for row in rows:
        ratio = row["ratio_mean"]
        if ratio is not None and ratio > 0:
            weights.append(ratio)
            logs.setdefault(row["staleness"], []).append(abs(math.log(ratio)))
    squares = math.fsum(weight * weight for weight in weights)
    effective = math.fsum(weights) ** 2 / (len(weights) * squares) if weights else None
    mismatch = ((staleness, sum(own) / len(own)) for staleness, own in sorted(logs.items()))
    return Contributed(step=step, effective=effective, mismatch=tuple(mismatch))
