"""Bisect: the step after which a probe's value falls, then the group whose removal mends it.

A probe gives a value per draw, and draw i has the same row and seed for all weights. Two versions
are compared by pairs; a third is compared with the middle of both:

    d_i = v_i - (good_i + bad_i) / 2

It is like the good one where mean(d) is above 0, for certain where the 95 % interval is.

The cause is looked for among the groups that stand out (`suspects`): steps are repeated without the
first one where it stands out alone, else without all of them, then without halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.analysis.suspects import Suspect
from dora_pipe.ledger.evaluations import Interval, interval_of

Verdict = Literal["good", "bad", "open"]
"""`open`: the interval holds the middle."""

Values = Sequence[float | None]
"""By draw; None where an answer has no reward."""


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

Measure = Callable[[Subject], Values]
"""Values of the draws of a subject; fewer where the probe has no more."""


def words(subject: Subject) -> str:
    """A subject for people."""
    if isinstance(subject, int):
        return f"version {subject}"
    steps = f"steps {subject.first} to {subject.last}"
    return f"{steps} without {', '.join(sorted(subject.drop))}" if subject.drop else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much is measured and repeated."""

    draws: int = 512
    """Draws per version and trial."""
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
    better: bool
    """Whether it is nearer to the good one than to the bad one."""
    verdict: Verdict
    value: Interval
    gain: Interval
    """Over the bad one, by pairs; above 0 is better."""
    before: float
    """The value of the bad one, for the same draws."""
    draws: int


@dataclass(slots=True)
class Comparison:
    """Compares subjects with a good and a bad one; a `direction` of -1 says that less is better."""

    measure: Measure
    good: Subject
    bad: Subject
    direction: float = 1.0
    measured: list[Measured] = field(default_factory=list)

    def judge(self, subject: Subject) -> Measured:
        """Measure a subject, and say which of the two it is like."""
        rows = paired(self.measure(subject), self.measure(self.good), self.measure(self.bad))
        middle = interval_of([self.direction * (v - (g + b) / 2) for v, g, b in rows])
        found = Measured(
            subject=subject,
            better=middle.value > 0,
            verdict="good" if middle.low > 0 else "bad" if middle.high < 0 else "open",
            value=interval_of([v for v, _, _ in rows]),
            gain=interval_of([self.direction * (v - b) for v, _, b in rows]),
            before=sum(b for _, _, b in rows) / len(rows),
            draws=len(rows),
        )
        self.measured.append(found)
        return found

    def fall(self) -> Interval:
        """By how much the bad one is worse, by pairs."""
        rows = paired(self.measure(self.good), self.measure(self.bad))
        return interval_of([self.direction * (g - b) for g, b in rows])


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
    """Where the value fell. Example: ``step=96``: the first bad version is 97."""

    fell: Interval
    """By how much from the first to the last version, by pairs; above 0 is worse."""
    measured: Sequence[Measured]
    """The two given versions, then those between in the order in which they were measured."""
    step: int
    """The step that made the first bad version from the last good one."""
    direction: float

    @property
    def sure(self) -> bool:
        """Whether the two given versions can be told apart."""
        return self.fell.low > 0


def search(measure: Measure, good: int, bad: int, *, direction: float | None = None) -> Fall:
    """Halve the versions between a good one and a later bad one.

    Without a `direction` the good version tells whether more is better.
    """
    if direction is None:
        pairs = paired(measure(good), measure(bad))
        direction = 1.0 if sum(g - b for g, b in pairs) >= 0 else -1.0
    comparison = Comparison(measure, good, bad, direction)
    fell = comparison.fall()
    comparison.judge(good)
    comparison.judge(bad)
    low, high = good, bad
    while fell.low > 0 and high - low > 1:
        version = (low + high) // 2
        if comparison.judge(version).better:
            low = version
        else:
            high = version
    measured = tuple(comparison.measured)
    return Fall(fell=fell, measured=measured, step=high - 1, direction=direction)


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

    def without(self, suspects: Sequence[Suspect]) -> Measured | None:
        """What steps come to without these; None where too few steps are left to try."""
        names = frozenset(one.name for one in suspects)
        if names not in self.tried:
            trial = Trial(first=min(one.step for one in suspects), last=self.last, drop=names)
            if trial.steps > self.left:
                self.over = True
                return None
            self.left -= trial.steps
            self.tried[names] = self.comparison.judge(trial)
        return self.tried[names]


def explain(
    comparison: Comparison, suspects: Sequence[Suspect], last: int, steps: int
) -> Explanation:
    """Find the suspect without which steps up to `last` come to what is good.

    All trials repeat at most so many steps.
    """
    trials = _Trials(comparison, last, steps)
    if suspects and not (_stands_alone(suspects) and _mends(trials, suspects[:1])):
        whole = trials.without(suspects)
        if whole is not None and whole.verdict != "bad":
            _halve(trials, suspects)
    mended = [names for names, one in trials.tried.items() if one.verdict == "good"]
    names = min(mended, key=len, default=frozenset(one.name for one in suspects))
    return Explanation(
        suspects=suspects,
        trials=tuple(comparison.measured),
        cause=[one for one in suspects if one.name in names] if mended else [],
        proof=trials.tried.get(names),
        steps=steps - trials.left,
        over=trials.over,
    )


def _mends(trials: _Trials, suspects: Sequence[Suspect]) -> bool:
    found = trials.without(suspects)
    return found is not None and found.verdict == "good"


def _halve(trials: _Trials, suspects: Sequence[Suspect]) -> None:
    """Try one of two halves, go on with the one that holds the cause, and try what is left."""
    while len(suspects) > 1 and not trials.over:
        part, other = halves(suspects)
        found = trials.without(part)
        suspects = part if found is not None and found.better else other
    trials.without(suspects)


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
