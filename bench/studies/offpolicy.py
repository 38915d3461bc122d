"""The off-policy study: which cells it has, what each measured, and what many of them say.

A cell trains the same task from the same warm start on as many samples as every other one; only
the objective and the staleness differ. Staleness is exact: step s trains what version
max(0, s - eta) sampled, neither a bound nor an average (see `sampled_by`).

Nothing here imports torch.
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
"""The objective that the others are compared with."""

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
"""What each one is made of: its kind with the defaults of that, and the demo's mean.

DAPO and Dr. GRPO are what they are by their means, and keep them. With both weights at 1 weighted
TOPR would be TOPR. The last three are masks, by the names of docs/objectives.md.
"""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Cell:
    """One training of the study."""

    objective: str
    eta: int
    seed: int

    def __str__(self) -> str:
        return f"{self.objective}, eta {self.eta}, seed {self.seed}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What one cell came to; a line of the study's file.

    Shares and ratios are means over the steps that had a gradient.
    """

    setting: str
    """Digest of all that must be equal in cells that are compared."""
    objective: str
    eta: int
    seed: int
    steps: int
    samples: int
    """Trained trajectories."""
    tokens: int
    """Sampled ones among them."""
    rewards: list[tuple[int, float]]
    """(version, mean reward of its evaluation); version v has trained v steps."""
    clipped: float
    """Share of tokens whose gradient the objective's bound changed."""
    masked: float | None
    """Share of tokens that were left out; None where the objective leaves none out."""
    ratio_max: float
    """Median over the steps of the greatest ratio that the objective bounds."""
    cpu_s: float
    diverged_at: int | None = None
    """The step whose loss or gradient was not finite: every later evaluation counts as 0."""

    @property
    def cell(self) -> Cell:
        """Which one it is. Raises ValueError for none of the study."""
        if self.objective not in OBJECTIVES or not self.rewards:
            raise ValueError(self.objective)
        return Cell(objective=self.objective, eta=self.eta, seed=self.seed)

    @property
    def last(self) -> float:
        """Evaluation reward after the last step."""
        return self.rewards[-1][1]

    @property
    def area(self) -> float:
        """Area under the evaluation reward over the steps, as its mean."""
        return area_of(self.rewards)


def sampled_by(step: int, eta: int) -> int:
    """The version whose samples a step trains on: ``sampled_by(10, eta=4) == 6``."""
    return max(0, step - eta)


def steps_of(version: int, *, eta: int, steps: int) -> range:
    """The steps whose samples this version makes; the inverse of `sampled_by`.

    Version 0 makes those of the first eta + 1 steps, every later one those of one step, and the
    last eta versions make none.
    """
    first = 0 if version == 0 else version + eta
    return range(min(first, steps), min(version + eta + 1, steps))


class StaleQueue(Generic[Batch]):
    """Batches on their way from the version that sampled them to the step that trains them.

    It holds eta + 1 at most. Keeping batches is the same as keeping policies and sampling late,
    and needs no weights but the present ones.

    Example: ``q = StaleQueue(eta=2, steps=36); q.fill(0, sample); q.take(0)``
    """

    def __init__(self, *, eta: int, steps: int) -> None:
        self._eta = eta
        self._steps = steps
        self._waiting: dict[int, tuple[int, Batch]] = {}

    def fill(self, version: int, sample: Callable[[int], Batch]) -> None:
        """Let `sample(step)` make what this version samples."""
        for step in steps_of(version, eta=self._eta, steps=self._steps):
            self._waiting[step] = (version, sample(step))
        assert len(self._waiting) <= self._eta + 1

    def take(self, step: int) -> Batch:
        """The batch of a step, once."""
        version, batch = self._waiting.pop(step)
        assert version == sampled_by(step, self._eta), (step, version)
        return batch


def planned(etas: Sequence[int], objectives: Sequence[str], seeds: int | None) -> list[Cell]:
    """The cells to measure, in order; without etas and objectives those of the whole study.

    Example: ``planned([0, 8], ["tis"], 1)`` are two. Raises UsageError.
    """
    for name in objectives:
        if name not in OBJECTIVES:
            raise UsageError(f"no objective {name!r}", hint=f"one of {', '.join(OBJECTIVES)}")
    if any(eta < 0 for eta in etas):
        raise UsageError("a negative staleness would need the future")
    whole = not etas and not objectives
    return [
        Cell(objective=name, eta=eta, seed=seed)
        for seed in range(seeds or SEEDS)
        for name in objectives or (OBJECTIVES if whole else (BASE,))
        for eta in etas or ETAS
    ]


def area_of(rewards: Sequence[tuple[int, float]]) -> float:
    """Mean height of a course of (step, reward), straight between its points.

    Example: ``area_of([(0, 0.0), (2, 1.0), (4, 1.0)]) == 0.75``
    """
    whole = rewards[-1][0] - rewards[0][0]
    if not whole:
        return rewards[-1][1]
    pairs = itertools.pairwise(rewards)
    return math.fsum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in pairs) / whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A figure over seeds."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """All seeds of one objective at one staleness."""

    objective: str
    eta: int
    seeds: int
    last: Spread
    area: Spread
    to_base: Spread | None
    """`last` less that of the base objective without staleness and with the same seed; None
    where that was not measured for any of its seeds."""
    clipped: float
    masked: float | None
    diverged: int
    """Seeds that ended in a loss or gradient that was not finite."""


def summarise(measured: Sequence[Measured]) -> list[Summary]:
    """By objective, in the order of `OBJECTIVES`, and staleness."""
    groups: dict[tuple[str, int], list[Measured]] = {}
    for one in measured:
        groups.setdefault((one.objective, one.eta), []).append(one)
    base = {one.seed: one.last for one in groups.get((BASE, 0), [])}
    order = list(OBJECTIVES)
    return [
        _summary(groups[key], base)
        for key in sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    ]


def _summary(seeds: Sequence[Measured], base: Mapping[int, float]) -> Summary:
    first = seeds[0]
    beside = [one.last - base[one.seed] for one in seeds if one.seed in base]
    masked = [one.masked for one in seeds if one.masked is not None]
    return Summary(
        objective=first.objective,
        eta=first.eta,
        seeds=len(seeds),
        last=spread([one.last for one in seeds]),
        area=spread([one.area for one in seeds]),
        to_base=spread(beside) if beside else None,
        clipped=mean([one.clipped for one in seeds]),
        masked=mean(masked) if masked else None,
        diverged=sum(one.diverged_at is not None for one in seeds),
    )


def spread(values: Sequence[float]) -> Spread:
    """Mean, lowest and highest of at least one value."""
    return Spread(mean=mean(values), low=min(values), high=max(values))


def mean(values: Sequence[float]) -> float:
    """0 for none."""
    return math.fsum(values) / len(values) if values else 0.0
