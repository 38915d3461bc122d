"""Find the step after which a probe's value falls, then the groups that caused it.

Draw i of a probe has the same row and seed for all weights, so two versions are compared by pairs.
A third version is compared with the middle of both:

    d_i = v_i - (good_i + bad_i) / 2

It is good if mean(d) > 0, with confidence if the 95 % interval is above 0.

The cause is searched among outlier groups (`suspects`): steps are repeated without the first one if
it dominates, else without all, then without halves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dora_pipe.analysis.suspects import Suspect
from dora_pipe.ledger.evaluations import Interval, interval_of

Verdict = Literal["good", "bad", "open"]
"""`open`: the interval contains the middle."""

Values = Sequence[float | None]
"""Values by draw; None if an answer has no reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps `first` .. `last` without some groups; all groups by default."""

    first: int
    last: int
    drop: frozenset[str] = frozenset()

    @property
    def steps(self) -> int:
        """Number of repeated steps."""
        return self.last - self.first + 1


Subject = int | Trial
"""A version, or a trial."""

Measure = Callable[[Subject], Values]
"""Function from a subject to its values by draw; fewer if the probe has no more."""


def words(subject: Subject) -> str:
    """Format a subject for people."""
    if isinstance(subject, int):
        return f"version {subject}"
    steps = f"steps {subject.first} to {subject.last}"
    return f"{steps} without {', '.join(sorted(subject.drop))}" if subject.drop else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on draws and repeated steps."""

    draws: int = 512
    """Draws per version and trial."""
    before: int = 2
    """Steps before the found one whose groups are suspects too, since optimizer moments
    carry over."""
    after: int = 1
    """Steps after the found one that a trial repeats too."""
    steps: int = 20
    """Repeated steps of all trials."""
    suspects: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A subject with its comparison."""

    subject: Subject
    better: bool
    """True if it is nearer to the good version than to the bad one."""
    verdict: Verdict
    value: Interval
    gain: Interval
    """Gain over the bad version, by pairs; above 0 is better."""
    before: float
    """Value of the bad version for the same draws."""
    draws: int


@dataclass(slots=True)
class Comparison:
    """Comparison with a good and a bad subject; `direction` -1 means less is better."""

    measure: Measure
    good: Subject
    bad: Subject
    direction: float = 1.0
    measured: list[Measured] = field(default_factory=list)

    def judge(self, subject: Subject) -> Measured:
        """Measure a subject and classify it."""
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
        """Return by how much the bad one is worse, by pairs."""
        rows = paired(self.measure(self.good), self.measure(self.bad))
        return interval_of([self.direction * (g - b) for g, b in rows])


def paired(*columns: Values) -> list[tuple[float, ...]]:
    """Return the draws for which every column has a value; one row of 0 if there are none."""
    rows = [
        tuple(float(value) for value in row if value is not None)
        for row in zip(*columns, strict=False)
        if None not in row
    ]
    return rows or [(0.0,) * len(columns)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Location of the fall. Example: ``step=96``: the first bad version is 97."""

    fell: Interval
    """Fall from the first to the last version, by pairs; above 0 is worse."""
    measured: Sequence[Measured]
    """The two given versions, then others in measurement order."""
    step: int
    """Step that made the first bad version from the last good one."""
    direction: float

    @property
    def sure(self) -> bool:
        """Report whether the two given versions differ with confidence."""
        return self.fell.low > 0


def search(measure: Measure, good: int, bad: int, *, direction: float | None = None) -> Fall:
    """Bisect the versions between a good one and a later bad one.

    Without a `direction`, the good version defines it.
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
    """Result of the trials."""

    suspects: Sequence[Suspect]
    trials: Sequence[Measured]
    """Trials in the order in which they were made."""
    cause: Sequence[Suspect]
    """Smallest tried set without which the value recovers; empty if there is none."""
    proof: Measured | None
    """Trial without the cause; without all suspects if there is no cause."""
    steps: int
    """Number of repeated steps."""
    over: bool
    """True if the step limit prevented a trial."""


@dataclass(slots=True)
class _Trials:
    comparison: Comparison
    last: int
    left: int
    over: bool = False
    tried: dict[frozenset[str], Measured] = field(default_factory=dict)

    def without(self, suspects: Sequence[Suspect]) -> Measured | None:
        """Run a trial without these; None if the step limit does not allow it."""
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
    """Find the suspects without which the steps up to `last` give a good value.

    All trials together repeat at most `steps` steps.
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
    """Try one half, continue with the half that contains the cause, then try the rest."""
    while len(suspects) > 1 and not trials.over:
        part, other = halves(suspects)
        found = trials.without(part)
        suspects = part if found is not None and found.better else other
    trials.without(suspects)


def _stands_alone(suspects: Sequence[Suspect]) -> bool:
    """Report whether the first deviates more, by variance, than all others together."""
    return suspects[0].deviations ** 2 >= sum(one.deviations**2 for one in suspects[1:])


def halves(suspects: Sequence[Suspect]) -> tuple[Sequence[Suspect], Sequence[Suspect]]:
    """Split at least two suspects into nonempty parts of similar weight.

    Example: weights 9, 3, 2, 1 give the first alone, and the others.
    """
    half, weight, count = sum(one.weight for one in suspects) / 2, 0.0, 0
    while count < len(suspects) - 1 and (weight < half or not count):
        weight += suspects[count].weight
        count += 1
    return suspects[:count], suspects[count:]
