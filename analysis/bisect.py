"""Find the step after which a probe's value falls, then the groups that caused it.

Draw i has the same row and seed for all weights, so versions are compared by pairs, and a third one
with the middle of two:

    d_i = v_i - (good_i + bad_i) / 2

It is good if mean(d) > 0, with confidence if the 95 % interval is above 0. Trials repeat steps
without the first suspect if it dominates, else without all, then without halves.
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
"""By draw; None without a reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Steps `first` .. `last` without some groups; all by default."""

    first: int
    last: int
    drop: frozenset[str] = frozenset()

    @property
    def steps(self) -> int:
        return self.last - self.first + 1


Subject = int | Trial

Measure = Callable[[Subject], Values]
"""Function from a subject to its values; fewer if the probe has no more."""


def words(subject: Subject) -> str:
    if isinstance(subject, int):
        return f"version {subject}"
    steps = f"steps {subject.first} to {subject.last}"
    return f"{steps} without {', '.join(sorted(subject.drop))}" if subject.drop else steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    draws: int = 512
    before: int = 2
    """Earlier steps with suspects, since optimizer moments carry over."""
    after: int = 1
    """Later steps that a trial repeats."""
    steps: int = 20
    suspects: int = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    subject: Subject
    better: bool
    """Nearer to the good version."""
    verdict: Verdict
    value: Interval
    gain: Interval
    """Over the bad version, by pairs; above 0 is better."""
    before: float
    """Value of the bad version for these draws."""
    draws: int


@dataclass(slots=True)
class Comparison:
    """Comparison with a good and a bad subject; `direction` -1: less is better."""

    measure: Measure
    good: Subject
    bad: Subject
    direction: float = 1.0
    measured: list[Measured] = field(default_factory=list)

    def judge(self, subject: Subject) -> Measured:
        """Measure a subject and classify it."""
        rows = paired(self.measure(subject), self.measure(self.good), self.measure(self.bad))
        middle = interval_of([self.direction * (v - (g + b) / 2) for v, g, b in rows])
        measured_step = Measured(
            subject=subject,
            better=middle.value > 0,
            verdict="good" if middle.low > 0 else "bad" if middle.high < 0 else "open",
            value=interval_of([v for v, _, _ in rows]),
            gain=interval_of([self.direction * (v - b) for v, _, b in rows]),
            before=sum(b for _, _, b in rows) / len(rows),
            draws=len(rows),
        )
        self.measured.append(measured_step)
        return measured_step

    def fall(self) -> Interval:
        """Return the loss of the bad one, by pairs."""
        rows = paired(self.measure(self.good), self.measure(self.bad))
        return interval_of([self.direction * (g - b) for g, b in rows])


def paired(*columns: Values) -> list[tuple[float, ...]]:
    """Return the draws valued in every column, or one row of 0."""
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
    """First to last version, by pairs; above 0 is worse."""
    measured: Sequence[Measured]
    """In measurement order; the given versions are first."""
    step: int
    direction: float

    @property
    def sure(self) -> bool:
        """Report whether the given versions differ with confidence."""
        return self.fell.low > 0


def search(measure: Measure, good: int, bad: int, *, direction: float | None = None) -> Fall:
    """Bisect between a good and a later bad version; by default, the good one sets `direction`."""
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
    suspects: Sequence[Suspect]
    trials: Sequence[Measured]
    """In order."""
    cause: Sequence[Suspect]
    """Smallest set without which the value recovers; may be empty."""
    proof: Measured | None
    """Trial without the cause, else without all suspects."""
    steps: int
    over: bool
    """The step limit prevented a trial."""


@dataclass(slots=True)
class _Trials:
    comparison: Comparison
    last: int
    left: int
    over: bool = False
    tried: dict[frozenset[str], Measured] = field(default_factory=dict)

    def trial_without(self, suspects: Sequence[Suspect]) -> Measured | None:
        """Run a trial; None beyond the step limit."""
        names = frozenset(suspect.name for suspect in suspects)
        if names not in self.tried:
            trial = Trial(
                first=min(suspect.step for suspect in suspects), last=self.last, drop=names
            )
            if trial.steps > self.left:
                self.over = True
                return None
            self.left -= trial.steps
            self.tried[names] = self.comparison.judge(trial)
        return self.tried[names]


def explain(
    comparison: Comparison, suspects: Sequence[Suspect], last: int, steps: int
) -> Explanation:
    """Find the cause of a bad value after step `last`, repeating at most `steps` steps."""
    trials = _Trials(comparison, last, steps)
    if suspects and not (_is_outlier(suspects) and _is_mended(trials, suspects[:1])):
        trial = trials.trial_without(suspects)
        if trial is not None and trial.verdict != "bad":
            _halve(trials, suspects)
    mended = [names for names, trial in trials.tried.items() if trial.verdict == "good"]
    names = min(mended, key=len, default=frozenset(suspect.name for suspect in suspects))
    return Explanation(
        suspects=suspects,
        trials=tuple(comparison.measured),
        cause=[suspect for suspect in suspects if suspect.name in names] if mended else [],
        proof=trials.tried.get(names),
        steps=steps - trials.left,
        over=trials.over,
    )


def _is_mended(trials: _Trials, suspects: Sequence[Suspect]) -> bool:
    trial = trials.trial_without(suspects)
    return trial is not None and trial.verdict == "good"


def _halve(trials: _Trials, suspects: Sequence[Suspect]) -> None:
    while len(suspects) > 1 and not trials.over:
        part, other = halves(suspects)
        trial = trials.trial_without(part)
        suspects = part if trial is not None and trial.better else other
    trials.trial_without(suspects)


def _is_outlier(suspects: Sequence[Suspect]) -> bool:
    return suspects[0].deviations ** 2 >= sum(suspect.deviations**2 for suspect in suspects[1:])


def halves(suspects: Sequence[Suspect]) -> tuple[Sequence[Suspect], Sequence[Suspect]]:
    """Split suspects into nonempty parts of similar weight.

    Example: weights 9, 3, 2, 1 give the first alone, and the others.
    """
    half, weight, count = sum(suspect.weight for suspect in suspects) / 2, 0.0, 0
    while count < len(suspects) - 1 and (weight < half or not count):
        weight += suspects[count].weight
        count += 1
    return suspects[:count], suspects[count:]
