"""Cells, results and summaries of the off-policy study; without torch.

Only objective and staleness differ. Step s trains samples of version max(0, s - eta).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Generic, TypeVar

import msgspec

from dora_pipe.core.errors import UsageError

Batch = TypeVar("Batch")

BASE: Final = "grpo"

ETAS: Final = (0, 1, 2, 4, 8)
SEEDS: Final = 3
_MEAN: Final = {"objective.loss": "sequence-mean"}
_DECOUPLED: Final = {"objective.kind": "decoupled-ppo", **_MEAN}

OBJECTIVES: Final[Mapping[str, Mapping[str, float | str]]] = MappingProxyType(
    {
        "grpo": {"objective.kind": "grpo", **_MEAN},
        "dapo": {"objective.kind": "dapo"},
        "dr-grpo": {"objective.kind": "dr-grpo"},
        "decoupled-ppo": _DECOUPLED,
        "tis": {"objective.kind": "tis", **_MEAN},
        "cispo": {"objective.kind": "cispo", **_MEAN},
        "topr": {"objective.kind": "topr", **_MEAN},
        "weighted-topr": {
            "objective.kind": "weighted-topr",
            "objective.negative_weight": 0.5,
            **_MEAN,
        },
        "gspo": {"objective.kind": "gspo", **_MEAN},
        "icepop": {**_DECOUPLED, "objective.mask": "token"},
        "mis": {**_DECOUPLED, "objective.level": "sequence", "objective.mask": "sequence"},
        "geometric": {**_DECOUPLED, "objective.mask": "geometric"},
    }
)
"""Objectives: kind with its defaults, and the demo's mean.

DAPO and Dr. GRPO keep their own means. With both weights at 1 weighted TOPR would equal TOPR. The
last three are masks, named as in docs/training.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    objective: str
    eta: int
    seed: int

    def __str__(self) -> str:
        return f"{self.objective}, eta {self.eta}, seed {self.seed}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a cell; shares and ratios are means over steps with a gradient."""

    setting: str
    """Digest of what compared cells share."""
    objective: str
    eta: int
    seed: int
    steps: int
    samples: int
    """Trained trajectories."""
    tokens: int
    """Their sampled tokens."""
    rewards: list[tuple[int, float]]
    """(version, mean evaluation reward); version v has trained v steps."""
    clipped: float
    """Share of tokens clipped by the bound."""
    masked: float | None
    """Share of tokens masked; None if the objective masks none."""
    ratio_max: float
    """Median over steps of the largest ratio that the objective bounds."""
    cpu_s: float
    diverged_at: int | None = None
    """Step with a non-finite loss or gradient; later evaluations count as 0."""

    @property
    def cell(self) -> Cell:
        """Return the cell. Raises ValueError if the study has no such cell."""
        if self.objective not in OBJECTIVES or not self.rewards:
            raise ValueError(self.objective)
        return Cell(objective=self.objective, eta=self.eta, seed=self.seed)

    @property
    def last(self) -> float:
        return self.rewards[-1][1]

    @property
    def area(self) -> float:
        """Return the reward curve's mean height."""
        return area_of(self.rewards)


def sampled_by(step: int, eta: int) -> int:
    """Return the sampling version: ``sampled_by(10, eta=4) == 6``."""
    return max(0, step - eta)


def steps_of(version: int, *, eta: int, steps: int) -> range:
    """Return the steps that a version samples; the inverse of `sampled_by`."""
    first = 0 if version == 0 else version + eta
    return range(min(first, steps), min(version + eta + 1, steps))


class StaleQueue(Generic[Batch]):
    """Queue of at most eta + 1 batches; equivalent to keeping old policies.

    Example: ``q = StaleQueue(eta=2, steps=36); q.fill(0, sample); q.take(0)``
    """

    def __init__(self, *, eta: int, steps: int) -> None:
        self._eta = eta
        self._steps = steps
        self._waiting: dict[int, tuple[int, Batch]] = {}

    def fill(self, version: int, sample: Callable[[int], Batch]) -> None:
        """Sample the version's steps."""
        for step in steps_of(version, eta=self._eta, steps=self._steps):
            self._waiting[step] = (version, sample(step))
        assert len(self._waiting) <= self._eta + 1

    def take(self, step: int) -> Batch:
        version, batch = self._waiting.pop(step)
        assert version == sampled_by(step, self._eta), (step, version)
        return batch


def planned(etas: Sequence[int], objectives: Sequence[str], seeds: int | None) -> list[Cell]:
    """Return the cells; ``planned([0, 8], ["tis"], 1)`` has two. Raises UsageError."""
    for name in objectives:
        if name not in OBJECTIVES:
            raise UsageError(f"no objective {name!r}", hint=f"one of {', '.join(OBJECTIVES)}")
    if any(eta < 0 for eta in etas):
        raise UsageError("staleness must be 0 or more")
    all_cells = not etas and not objectives
    return [
        Cell(objective=name, eta=eta, seed=seed)
        for seed in range(seeds or SEEDS)
        for name in objectives or (OBJECTIVES if all_cells else (BASE,))
        for eta in etas or ETAS
    ]


def area_of(rewards: Sequence[tuple[int, float]]) -> float:
    """Return the interpolated mean height: ``area_of([(0, 0.0), (2, 1.0), (4, 1.0)]) == 0.75``."""
    span = rewards[-1][0] - rewards[0][0]
    if not span:
        return rewards[-1][1]
    pairs = itertools.pairwise(rewards)
    return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / span


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    objective: str
    eta: int
    seeds: int
    last: Spread
    area: Spread
    to_base: Spread | None
    """Paired difference of `last` to the baseline without staleness; None if not measured."""
    clipped: float
    masked: float | None
    diverged: int
    """Seeds with a non-finite loss or gradient."""


def summarise(measured: Sequence[Measured]) -> list[Summary]:
    """Summarize by objective and staleness."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for result in measured:
        groups.setdefault((result.objective, result.eta), []).append(result)
    base = {result.seed: result.last for result in groups.get((BASE, 0), [])}
    order = list(OBJECTIVES)
    return [
        _summary(groups[key], base)
        for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ]


def _summary(seeds: Sequence[Measured], base: Mapping[int, float]) -> Summary:
    first = seeds[0]
    beside = [seed.last - base[seed.seed] for seed in seeds if seed.seed in base]
    masked = [seed.masked for seed in seeds if seed.masked is not None]
    return Summary(
        objective=first.objective,
        eta=first.eta,
        seeds=len(seeds),
        last=spread([seed.last for seed in seeds]),
        area=spread([seed.area for seed in seeds]),
        to_base=spread(beside) if beside else None,
        clipped=mean([seed.clipped for seed in seeds]),
        masked=mean(masked) if masked else None,
        diverged=sum(seed.diverged_at is not None for seed in seeds),
    )


def spread(values: Sequence[float]) -> Spread:
    return Spread(mean=mean(values), low=min(values), high=max(values))


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
