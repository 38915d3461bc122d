"""Learning rate of a step. Uses additions, multiplications and divisions only: `math.cos` differs
in its last bit between C libraries, and an audit recomputes the decision."""

from __future__ import annotations

import math
from typing import Final, Literal

RateSchedule = Literal["constant", "linear", "cosine"]

_TERMS: Final = 12
"""Terms of the cosine's series; within a right angle the next one is below 1e-19."""


def rate_of(
    step: int, *, peak: float, schedule: RateSchedule, warmup: int, end: int, least: float
) -> float:
    """Return the learning rate of `step` (from 0). It grows linearly to `peak` over `warmup` steps,
    then falls linearly or on half a cosine to `least` (a share of the peak) at step `end`. Example:
    ``rate_of(50, peak=1.0, schedule="linear", warmup=0, end=100, least=0.0) == 0.5``"""
    if step < warmup:
        return peak * ((step + 1) / warmup)
    if schedule == "constant":
        return peak
    if step >= end:
        return peak * least
    progress = (step - warmup) / (end - warmup)
    factor = (
        1.0 - progress if schedule == "linear" else (1.0 + _cosine_of_half_turns(progress)) / 2.0
    )
    return peak * (least + (1.0 - least) * factor)


def _cosine_of_half_turns(turns: float) -> float:
    """Return cos(pi * turns) for turns from 0 to 1."""
    if turns > 0.5:
        return -_cosine_of_half_turns(1.0 - turns)
    square = (math.pi * turns) * (math.pi * turns)
    term = total = 1.0
    for number in range(1, _TERMS):
        term = -term * square / ((2 * number - 1) * (2 * number))
        total += term
    return total
