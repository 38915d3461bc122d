"""Which groups of a step stand out, by what, and in which words; pure.

Every measure of a group is held against those of the other groups of its step: how many robust
standard deviations (of the median absolute deviation) it lies above their median; what has no upper
end is measured by its logarithm, since shares of a loss and ratios have long tails in any step. A
group is as suspicious as its most extreme measure. Nothing here says that it did any harm: trials
do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p
from statistics import fmean, median
from typing import Final

from dora_pipe.audit.culprits import Suspect

PERIOD_MAX: Final = 64
"""Tokens of a loop, at most."""

ROUNDS_MIN: Final = 3
"""So often a loop comes at the end of an answer, at least."""

LOOP_TOKENS_MIN: Final = 12
"""So long all rounds of a loop are together: three equal digits are none."""

STANDS_OUT: Final = 3.0
"""Standard deviations from which a measure is named."""

MAD_TO_STD: Final = 1.4826
"""Of a normal distribution, the standard deviation over the median absolute deviation."""

MEAN_TO_STD: Final = 1.2533
"""The same over the mean absolute deviation, for measures that are equal in most groups."""

REASONS_MAX: Final = 3
"""Named of one group, those that stand out most."""

SHARE_MIN: Final = 1e-6
"""Smaller shares of a step's loss are none."""

DEVIATIONS_MIN: Final = 0.1
"""Of a group that does not stand out at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedRow:
    """A trajectory of a step, with what the step's contributions say of it.

    Example: ``TrainedRow(step=96, group="g0000003871", trajectory="g0000003871-003", reward=1.0,
    advantage=0.4, tokens=120, ratio_max=1.1, loss_share=0.002, answer=(5, 6, 7))``
    """

    step: int
    group: str
    trajectory: str
    reward: float | None
    advantage: float | None
    tokens: int
    """Sampled ones."""
    ratio_max: float | None
    loss_share: float | None
    answer: Sequence[int]
    """The sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """What an answer ends in. Example: ``Loop(period=40, rounds=4)``."""

    period: int
    rounds: int


def loop_of(answer: Sequence[int]) -> Loop | None:
    """The shortest loop that an answer ends in; its last round may be cut short.

    Example: ``loop_of([1, 5, 6, 5, 6, 5, 6, ...])`` has a period of 2.
    """
    tokens = tuple(answer)
    for period in range(1, min(PERIOD_MAX, len(tokens) // ROUNDS_MIN) + 1):
        same = 0
        while same < len(tokens) - period and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        length = same + period
        if length >= max(ROUNDS_MIN * period, LOOP_TOKENS_MIN):
            return Loop(period=period, rounds=length // period)
    return None


def suspects_of(rows: Sequence[TrainedRow], most: int) -> list[Suspect]:
    """The groups of some steps that stand out most, each within its own step, the first the most.

    One group of every step is never among them: a step without any would be none.
    """
    found: list[Suspect] = []
    for step in sorted({one.step for one in rows}):
        groups = _by_group([one for one in rows if one.step == step])
        ranked = sorted(_ranked(step, groups), key=lambda one: (-one.weight, one.name))
        found += ranked[:-1]
    return sorted(found, key=lambda one: (-one.weight, one.name))[:most]


def siblings_of(rows: Sequence[TrainedRow], group: str) -> list[Suspect]:
    """The trajectories of a group, each held against the others of its step."""
    own = [one for one in rows if one.group == group]
    others = [one for one in rows if own and one.step == own[0].step]
    ranked = _ranked(own[0].step, {one.trajectory: [one] for one in others}) if own else []
    names = {one.trajectory for one in own}
    return [one for one in ranked if one.name in names]


def _by_group(rows: Sequence[TrainedRow]) -> dict[str, list[TrainedRow]]:
    groups: dict[str, list[TrainedRow]] = {}
    for one in rows:
        groups.setdefault(one.group, []).append(one)
    return groups


def _ranked(step: int, groups: Mapping[str, Sequence[TrainedRow]]) -> list[Suspect]:
    """Groups, or trajectories as groups of one, with weights and reasons."""
    every = [one for rows in groups.values() for one in rows]
    typical = _Typical(
        reward=median(one.reward for one in every if one.reward is not None)
        if any(one.reward is not None for one in every)
        else 0.0,
        tokens=median(one.tokens for one in every),
        loss=sum(abs(one.loss_share or 0.0) for one in every),
    )
    out = {
        name: dict(
            zip(
                groups,
                _deviations([one.of(own, typical) for own in groups.values()], one.spread_min),
                strict=True,
            )
        )
        for name, one in MEASURES.items()
    }
    found = []
    for group, own in groups.items():
        by_measure = sorted(((out[name][group], name) for name in MEASURES), reverse=True)
        named = [name for far, name in by_measure if far >= STANDS_OUT][:REASONS_MAX]
        reasons = tuple(MEASURES[name].words(own, typical) for name in named)
        far = max(by_measure[0][0], DEVIATIONS_MIN)
        found.append(Suspect(name=group, step=step, deviations=far, reasons=reasons))
    return found


def _deviations(values: Sequence[float], spread_min: float) -> list[float]:
    """How many robust standard deviations each lies above the median; 0 below it."""
    middle = median(values)
    far = [abs(one - middle) for one in values]
    scale = max(MAD_TO_STD * median(far) or MEAN_TO_STD * fmean(far), spread_min)
    return [max(0.0, (one - middle) / scale) for one in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Typical:
    """What a step has in general."""

    reward: float
    tokens: float
    loss: float
    """Absolute shares of the loss, added up."""


Rows = Sequence[TrainedRow]


@dataclass(frozen=True, slots=True)
class Measure:
    """What is measured of a group."""

    of: Callable[[Rows, _Typical], float]
    words: Callable[[Rows, _Typical], str]
    """How it is said where it stands out."""
    spread_min: float
    """Of a step: groups that differ by less are alike, however alike the others are."""


def _rewards(rows: Rows) -> list[float]:
    return [one.reward for one in rows if one.reward is not None]


def _reward(rows: Rows, typical: _Typical) -> float:
    return log1p(max((abs(one - typical.reward) for one in _rewards(rows)), default=0.0))


def _reward_words(rows: Rows, typical: _Typical) -> str:
    low, high = min(_rewards(rows)), max(_rewards(rows))
    what = f"reward {low:g}" if low == high else f"rewards {low:g} to {high:g}"
    return f"{what}, the step's median is {typical.reward:g}"


def _advantage(rows: Rows, typical: _Typical) -> float:
    return log1p(max((abs(one.advantage or 0.0) for one in rows), default=0.0))


def _advantage_words(rows: Rows, typical: _Typical) -> str:
    most = max((one.advantage or 0.0 for one in rows), key=abs)
    return f"advantage {most:.3g}"


def _share(rows: Rows, typical: _Typical) -> float:
    own = sum(abs(one.loss_share or 0.0) for one in rows)
    return own / typical.loss if typical.loss else 0.0


def _loss(rows: Rows, typical: _Typical) -> float:
    return log(max(_share(rows, typical), SHARE_MIN))


def _loss_words(rows: Rows, typical: _Typical) -> str:
    return f"{_share(rows, typical):.0%} of the step's loss"


def _most(rows: Rows) -> float:
    return max(one.ratio_max or 1.0 for one in rows)


def _ratio(rows: Rows, typical: _Typical) -> float:
    return log(max(_most(rows), 1.0))


def _ratio_words(rows: Rows, typical: _Typical) -> str:
    return f"ratios up to {_most(rows):.3g}"


def _length(rows: Rows, typical: _Typical) -> float:
    return log1p(fmean(one.tokens for one in rows))


def _length_words(rows: Rows, typical: _Typical) -> str:
    long = fmean(one.tokens for one in rows)
    return f"{long:.0f} tokens, the step's median is {typical.tokens:.0f}"


def _looping(rows: Rows) -> list[tuple[Loop, TrainedRow]]:
    pairs = ((loop_of(one.answer), one) for one in rows)
    return [(loop, one) for loop, one in pairs if loop is not None]


def _loops(rows: Rows, typical: _Typical) -> float:
    return len(_looping(rows)) / len(rows)


def _loop_words(rows: Rows, typical: _Typical) -> str:
    found = _looping(rows)
    rounds = Counter(_round(loop, one) for loop, one in found)
    ids, count = rounds.most_common(1)[0]
    same = count == len(found) and count > 1
    which = "the same" if same else "a"
    rewards = sorted(set(_rewards([one for _, one in found])))
    worth = f", reward {fmean(rewards):.3g}" if rewards else ""
    return f"{len(found)} of {len(rows)} end in {which} {len(ids)}-token loop{worth}"


def _round(loop: Loop, row: TrainedRow) -> tuple[int, ...]:
    """The tokens of a loop, wherever it was cut off: the first of its turnings."""
    last = tuple(row.answer[-loop.period :])
    return min(last[at:] + last[:at] for at in range(len(last)))


def _alike(rows: Rows, typical: _Typical) -> float:
    return _most_common(rows) / len(rows) if len(rows) > 1 else 0.0


def _alike_words(rows: Rows, typical: _Typical) -> str:
    return f"{_most_common(rows)} of {len(rows)} say the same"


def _most_common(rows: Rows) -> int:
    return Counter(tuple(one.answer) for one in rows).most_common(1)[0][1]


MEASURES: Final[Mapping[str, Measure]] = {
    "loop": Measure(_loops, _loop_words, 0.1),
    "reward": Measure(_reward, _reward_words, 0.1),
    "loss share": Measure(_loss, _loss_words, 0.5),
    "ratio": Measure(_ratio, _ratio_words, 0.1),
    "length": Measure(_length, _length_words, 0.2),
    "advantage": Measure(_advantage, _advantage_words, 0.2),
    "alike": Measure(_alike, _alike_words, 0.1),
}
"""By name; what has no upper end is a logarithm."""
