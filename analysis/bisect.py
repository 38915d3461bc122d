"""Bisect: the step after which a probe's value falls, then the group whose removal mends it.

A probe gives a value per draw, and draw i has the same row and seed for all weights. Two versions
are compared by pairs; a third is compared with the middle of both:

    d_i = v_i - (good_i + bad_i) / 2

It is good where the 95 % interval of mean(d) is above 0, bad where it is below; otherwise the draws
are doubled, up to a bound or until it is about halfway for certain.

The cause is looked for among the groups that stand out (`suspects`): steps are repeated without the
first one where it stands out alone, else without all of them, then without halves.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from dora_pipe.analysis.suspects import Suspect
from dora_pipe.ledger.evaluations import Interval, interval_of

Verdict = Literal["good", "bad", "open"]
"""`open`: the interval holds the middle."""

Values = Sequence[float | None]
"""By draw; None where an answer has no reward."""

HALFWAY: Final = 0.25
"""Share of the difference between good and bad within which a version is halfway."""

FIT: Final = 0.25
"""Share of the versions between; a kept one this near to the middle is measured instead of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps `first` .. `last` without some groups; all of them by default."""

    first: int
    last: int
    drop: frozenset[str] = frozenset()

    @property
    def steps(self) -> int:
        """How many are repeated."""
        return self.last - self.first + 1


Subject = int | Trial
"""A version, or what steps come to without some groups."""

Measure = Callable[[Subject, int], Values]
"""Values of draws 0 .. n-1 for a subject; fewer where the probe has no more."""


def words(subject: Subject) -> str:
    """A subject for people."""
    if isinstance(subject, int):
        return f"version {subject}"
    steps = f"steps {subject.first} to {subject.last}"
    return f"{steps} without {', '.join(sorted(subject.drop))}" if subject.drop else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is measured and repeated."""

    draws: int = 256
    """At first."""
    draws_max: int = 2048
    before: int = 2
    """Steps before the found one whose groups are suspects too: an optimizer carries on moments."""
    after: int = 1
    """Steps after the found one that a trial repeats too."""
    steps: int = 20
    """Repeated steps, in all trials."""
    suspects: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A subject, and what its draws say."""

    subject: Subject
    verdict: Verdict
    value: Interval
    gain: Interval
    """Over the bad one, by pairs; above 0 is better."""
    before: float
    """The value of the bad one, for the same draws."""
    halfway: bool
    """Whether it is near the middle for certain."""
    draws: int


@dataclass(slots=True)
class Comparison:
    """Compares subjects with a good and a bad one; `direction` is 1 where more is better, else -1.

    It doubles the draws until an interval decides.
    """

    measure: Measure
    good: Subject
    bad: Subject
    limits: Limits
    direction: float = 1.0
    measured: list[Measured] = field(default_factory=list)

    def judge(self, subject: Subject) -> Measured:
        """Measure a subject, and say which of the two it is like."""
        draws = self.limits.draws
        while True:
            values = self.measure(subject, draws)
            found = self._compare(subject, values, draws)
            over = draws >= self.limits.draws_max or len(values) < draws
            if found.verdict != "open" or found.halfway or over:
                self.measured.append(found)
                return found
            draws = min(2 * draws, self.limits.draws_max)

    def _compare(self, subject: Subject, values: Values, draws: int) -> Measured:
        good, bad = self.measure(self.good, draws), self.measure(self.bad, draws)
        rows = paired(values, good, bad)
        middle = interval_of([self.direction * (v - (g + b) / 2) for v, g, b in rows])
        drop = abs(sum(g - b for _, g, b in rows)) / len(rows)
        verdict: Verdict = "good" if middle.low > 0 else "bad" if middle.high < 0 else "open"
        return Measured(
            subject=subject,
            verdict=verdict,
            value=interval_of([v for v, _, _ in rows]),
            gain=interval_of([self.direction * (v - b) for v, _, b in rows]),
            before=sum(b for _, _, b in rows) / len(rows),
            halfway=max(-middle.low, middle.high) < HALFWAY * drop,
            draws=len(rows),
        )

    def fall(self) -> Interval:
        """By how much the bad one is worse, by pairs."""
        draws = self.limits.draws
        while True:
            good, bad = self.measure(self.good, draws), self.measure(self.bad, draws)
            fell = interval_of([self.direction * (g - b) for g, b in paired(good, bad)])
            if fell.low > 0 or draws >= self.limits.draws_max or len(good) < draws:
                return fell
            draws = min(2 * draws, self.limits.draws_max)


def paired(*columns: Values) -> list[tuple[float, ...]]:
    """The draws that every column has a value of; one row of 0 where there is none."""
    rows = [
        tuple(float(value) for value in row if value is not None)
        for row in zip(*columns, strict=False)
        if None not in row
    ]
    return rows or [(0.0,) * len(columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Where the value fell. Example: ``last_good=96, first_bad=97``: step 96 made it."""

    fell: Interval
    """By how much from the first to the last version, by pairs; above 0 is worse."""
    measured: Sequence[Measured]
    """The two given versions, then those between in the order in which they were measured."""
    last_good: int
    first_bad: int
    direction: float

    @property
    def sure(self) -> bool:
        """Whether the two given versions can be told apart."""
        return self.fell.low > 0


def search(
    measure: Measure,
    good: int,
    bad: int,
    limits: Limits,
    *,
    kept: Collection[int] = (),
    direction: float | None = None,
) -> Fall:
    """Halve the versions between a good one and a later bad one.

    `kept` versions need not be made again. Without a `direction` the good version tells whether
    more is better. Versions between `last_good` and `first_bad` remain open.
    """
    if direction is None:
        pairs = paired(measure(good, limits.draws), measure(bad, limits.draws))
        direction = 1.0 if sum(g - b for g, b in pairs) >= 0 else -1.0
    comparison = Comparison(measure, good, bad, limits, direction)
    fell = comparison.fall()
    comparison.judge(good)
    comparison.judge(bad)
    low, high, undecided = good, bad, set[int]()
    while fell.low > 0 and (version := _next(low, high, undecided, kept)) is not None:
        verdict = comparison.judge(version).verdict
        low = version if verdict == "good" else low
        high = version if verdict == "bad" else high
        undecided |= {version} if verdict == "open" else set()
    return Fall(
        fell=fell,
        measured=tuple(comparison.measured),
        last_good=low,
        first_bad=high,
        direction=direction,
    )


def _next(low: int, high: int, undecided: Collection[int], kept: Collection[int]) -> int | None:
    """The version next to the middle, or a kept one near it; None where none is left."""
    between = [version for version in range(low + 1, high) if version not in undecided]

    def far(version: int) -> float:
        return abs(version - (low + high) / 2)

    near = [one for one in between if one in kept and far(one) <= FIT * (high - low)]
    return min(near or between, key=lambda version: (far(version), version), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the trials say."""

    suspects: Sequence[Suspect]
    trials: Sequence[Measured]
    """In the order in which they were made."""
    cause: Sequence[Suspect]
    """The smallest tried set without which the value recovers; empty: there is none."""
    proof: Measured | None
    """The trial without the cause; without all suspects where there is none."""
    steps: int
    """Repeated steps."""
    over: bool
    """Whether a trial was not made for want of steps."""


@dataclass(slots=True)
class _Trials:
    comparison: Comparison
    last: int
    left: int
    over: bool = False
    tried: dict[frozenset[str], Measured] = field(default_factory=dict)

    def recovers(self, without: Sequence[Suspect]) -> bool:
        """Whether the value is good again without these."""
        names = frozenset(one.name for one in without)
        if names not in self.tried:
            trial = Trial(first=min(one.step for one in without), last=self.last, drop=names)
            if trial.steps > self.left:
                self.over = True
                return False
            self.left -= trial.steps
            self.tried[names] = self.comparison.judge(trial)
        return self.tried[names].verdict == "good"


def explain(comparison: Comparison, suspects: Sequence[Suspect], last: int) -> Explanation:
    """Find the suspect without which steps up to `last` come to what is good."""
    trials = _Trials(comparison, last, comparison.limits.steps)
    if suspects and not (_stands_alone(suspects) and trials.recovers(suspects[:1])):
        trials.recovers(suspects)
        whole = trials.tried.get(frozenset(one.name for one in suspects))
        if whole is not None and whole.verdict != "bad":
            _halve(trials, suspects)
    mended = [names for names, one in trials.tried.items() if one.verdict == "good"]
    names = min(mended, key=len, default=frozenset(one.name for one in suspects))
    return Explanation(
        suspects=suspects,
        trials=tuple(comparison.measured),
        cause=[one for one in suspects if one.name in names] if mended else [],
        proof=trials.tried.get(names),
        steps=comparison.limits.steps - trials.left,
        over=trials.over,
    )


def _halve(trials: _Trials, suspects: Sequence[Suspect]) -> None:
    """Try one of two halves, go on with the one that holds the cause, and try what is left."""
    while len(suspects) > 1 and not trials.over:
        part, other = halves(suspects)
        suspects = part if trials.recovers(part) else other
    trials.recovers(suspects)


def _stands_alone(suspects: Sequence[Suspect]) -> bool:
    """Whether the first stands out more, by variance, than all others together."""
    return suspects[0].deviations ** 2 >= sum(one.deviations**2 for one in suspects[1:])


def halves(suspects: Sequence[Suspect]) -> tuple[Sequence[Suspect], Sequence[Suspect]]:
    """Two parts of about equal weight of at least two suspects, each with one at least.

    Example: weights 9, 3, 2, 1 give the first alone, and the others.
    """
    half, weight, count = sum(one.weight for one in suspects) / 2, 0.0, 0
    while count < len(suspects) - 1 and (weight < half or not count):
        weight += suspects[count].weight
        count += 1
    return suspects[:count], suspects[count:]
