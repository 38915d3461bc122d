"""Modeled response lengths: a censored log-normal.

A share `rho` of the log-length's variance belongs to the prompt. Lengths depend on (seed, ordinal,
sample index) only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Distribution of sampled tokens. Example: ``EFFICIENCY.draw(seed=1, ordinal=0, size=16)``"""

    mu: float
    """Mean of the logarithm."""
    sigma: float
    """Standard deviation of the logarithm."""
    cap: int
    """Tokens."""
    rho: float = 0.5
    """Correlation of logarithms within a group."""

    def draw(self, *, seed: int, ordinal: int, size: int) -> tuple[int, ...]:
        """Return a group's lengths, at least 1."""
        chance = Random(f"{seed}/{ordinal}")
        prompt = math.sqrt(self.rho) * chance.gauss()
        own = math.sqrt(1 - self.rho)
        return tuple(
            self._cut(self.mu + self.sigma * (prompt + own * chance.gauss())) for _ in range(size)
        )

    def _cut(self, logarithm: float) -> int:
        if logarithm >= math.log(self.cap):
            return self.cap
        return max(1, math.ceil(math.exp(logarithm)))


EFFICIENCY: Final = Lengths(mu=6.908, sigma=1.363, cap=30_720)
"""Fitted to DORA's efficiency checkpoint (mean 2.4K, cap 30K, 0.6 % at the cap)."""
STEP_100: Final = Lengths(mu=7.00, sigma=1.688, cap=30_720)
"""Fitted to step 100 of DORA's training run: mean 3.5K, bubble 88.5 %."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthFigures:
    mean: float
    p50: float
    p90: float
    p99: float
    capped: float
    """Share at the cap."""
    group_max: float
    """Mean of a group's longest response."""

    @property
    def tail(self) -> float:
        """M_tail: E[longest of a group] / E[length]."""
        return self.group_max / self.mean


@cache
def figures_of(lengths: Lengths, *, size: int, groups: int = 4000, seed: int = 0) -> LengthFigures:
    """Return statistics of drawn groups."""
    drawn = [lengths.draw(seed=seed, ordinal=ordinal, size=size) for ordinal in range(groups)]
    flat = sorted(length for group in drawn for length in group)
    count = len(flat)
    return LengthFigures(
        mean=sum(flat) / count,
        p50=flat[count // 2],
        p90=flat[int(count * 0.9)],
        p99=flat[int(count * 0.99)],
        capped=sum(length >= lengths.cap for length in flat) / count,
        group_max=sum(map(max, drawn)) / groups,
    )


def bubble(lengths: LengthFigures, *, longest: float) -> float:
    """Return the share of idle slots of a synchronous rollout: (max L - mean L) / max L."""
    return (longest - lengths.mean) / longest
