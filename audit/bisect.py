"""Between which versions a probe's value fell; decides which version is asked next, and how often.

Pure: a plan yields what it wants measured (`Ask`) and is sent the values of the draws; who measures
may remember them, and an ended command that is given the same values comes to the same place.

A probe gives a value for every draw, and draw i is of the same row with the same seed under every
version. So two versions are compared by pairs, and a third is held against the middle of both:

    d_i = v_i - (good_i + bad_i) / 2

It is good where the 95 % interval of mean(d) is above 0, bad where it is below, and otherwise more
draws are asked for: up to a bound, or until it is about halfway for certain. The
interval is that of the rows that there are: seeds are what is random.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeVar

from dora_pipe.catalogue.evaluations import Interval, interval_of

T = TypeVar("T")

Verdict = Literal["good", "bad", "open"]
"""`open`: the interval holds the middle, and more draws would hardly say more."""

Values = Sequence[float | None]
"""By draw; None where an answer has no reward."""

HALFWAY: Final = 0.25
"""Of the difference between good and bad: who is nearer to the middle for certain is halfway."""

FIT: Final = 0.25
"""Of the versions between: so far from the middle one that is kept is taken in place of one that
has to be made again."""


DRAWS_MAX: Final = 2048
"""Of a probe, for a version or a trial, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class Version:
    """A version as the run has it."""

    version: int

    @property
    def words(self) -> str:
        """For people, and what its values are remembered by."""
        return f"version {self.version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What steps `first` .. `last` come to without some groups or trajectories.

    Example: ``Trial(first=96, last=98, without=frozenset({"g0000003871"}))`` begins with version 96
    and ends with what would be version 99.
    """

    first: int
    last: int
    without: frozenset[str] = frozenset()

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    @property
    def words(self) -> str:
        """For people, and what its values are remembered by."""
        steps = f"steps {self.first} to {self.last}"
        names = ", ".join(sorted(self.without))
        return f"{steps} without {names}" if names else f"{steps} as they were"


Subject = Version | Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Draws 0 .. `draws - 1` of the probe are wanted; fewer come where there are no more."""

    subject: Subject
    draws: int


Plan = Generator[Ask, Values, T]


def carry_out(plan: Plan[T], values: Callable[[Ask], Values]) -> T:
    """Give a plan what it asks for until it has come to its end, and return what that is."""
    try:
        ask = next(plan)
        while True:
            ask = plan.send(values(ask))
    except StopIteration as over:
        found: T = over.value
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long is asked."""

    draws: int = 256
    """At first."""
    draws_max: int = DRAWS_MAX
    after: int = 1
    """Steps after the one that is looked into, which are trained again too."""
    before: int = 2
    """Steps before it among whose groups suspects are: an optimizer's moments carry on what one
    did."""
    steps: int = 20
    """Steps that are trained again, in all trials."""
    suspects: int = 16
    """Groups that may have done it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A subject, and what its draws say."""

    subject: Subject
    verdict: Verdict
    value: Interval
    gain: Interval
    """Over what is bad, by pairs: above 0 is better, whatever the probe's direction."""
    before: float
    """The value of what is bad, of the same draws."""
    halfway: bool
    """Whether it is near the middle for certain."""
    draws: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """The two that others are held against."""

    good: Subject
    bad: Subject


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """Where the value fell.

    Example: ``last_good=96, first_bad=97``: step 96 made it.
    """

    good: Measured
    bad: Measured
    fell: Interval
    """By how much from `good` to `bad`, by pairs, above 0 is worse."""
    tested: Sequence[Measured] = ()
    """Versions between, in the order in which they were asked for."""
    last_good: int
    first_bad: int
    direction: float
    """1 where more is better, -1 where less is."""

    @property
    def sure(self) -> bool:
        """Whether good and bad can be told apart at all."""
        return self.fell.low > 0

    @property
    def undecided(self) -> list[int]:
        """Versions between the two of which it cannot be said."""
        return list(range(self.last_good + 1, self.first_bad))


@dataclass(slots=True)
class Comparison:
    """Holds subjects against two; asks for more draws until an interval decides.

    `direction` is 1 where more is better, -1 where less is.
    """

    reference: Reference
    limits: Limits
    direction: float = 1.0
    measured: list[Measured] = field(default_factory=list)

    def judge(self, subject: Subject) -> Plan[Measured]:
        """Measure a subject, and say which of the two it is like."""
        draws = self.limits.draws
        while True:
            good, bad = yield from both(self.reference, draws)
            values = yield Ask(subject=subject, draws=draws)
            found = compared(subject, values, good, bad, direction=self.direction)
            over = draws >= self.limits.draws_max or len(values) < draws
            if found.verdict != "open" or found.halfway or over:
                self.measured.append(found)
                return found
            draws = min(2 * draws, self.limits.draws_max)


def both(reference: Reference, draws: int) -> Plan[tuple[Values, Values]]:
    """So many draws of the good and of the bad one."""
    good = yield Ask(subject=reference.good, draws=draws)
    bad = yield Ask(subject=reference.bad, draws=draws)
    return good, bad


def compared(
    subject: Subject, values: Values, good: Values, bad: Values, *, direction: float
) -> Measured:
    """A subject held against the middle of two."""
    rows = paired(values, good, bad)
    middle = interval_of([direction * (v - (g + b) / 2) for v, g, b in rows])
    drop = abs(sum(g - b for _, g, b in rows))
    verdict: Verdict = "good" if middle.low > 0 else "bad" if middle.high < 0 else "open"
    return Measured(
        subject=subject,
        verdict=verdict,
        value=interval_of([v for v, _, _ in rows]),
        gain=interval_of([direction * (v - b) for v, _, b in rows]),
        before=sum(b for _, _, b in rows) / len(rows),
        halfway=max(-middle.low, middle.high) < HALFWAY * drop / len(rows),
        draws=len(rows),
    )


def paired(*columns: Values) -> list[tuple[float, ...]]:
    """The draws that every column has a value of; one of 0 where there is none."""
    rows = [
        tuple(float(one) for one in row if one is not None)
        for row in zip(*columns, strict=False)
        if None not in row
    ]
    return rows or [(0.0,) * len(columns)]


def search(
    good: int,
    bad: int,
    limits: Limits,
    *,
    kept: Collection[int] = (),
    direction: float | None = None,
) -> Plan[Fall]:
    """Halve the versions between a good one and a later bad one.

    `kept` need not be made again; `direction` as in `fallen`. At the end `last_good` is good,
    `first_bad` is bad, and of those between, where there are any, it cannot be said.
    """
    reference = Reference(good=Version(good), bad=Version(bad))
    fell, better = yield from fallen(reference, limits, direction)
    one, other = yield from both(reference, limits.draws)
    first, last = (
        compared(subject, values, one, other, direction=better)
        for subject, values in ((reference.good, one), (reference.bad, other))
    )
    found = Comparison(reference, limits, better)
    low, high = good, bad
    undecided: set[int] = set()
    while fell.low > 0:
        at = _next(low, high, undecided, kept)
        if at is None:
            break
        verdict = (yield from found.judge(Version(at))).verdict
        if verdict == "good":
            low = at
        elif verdict == "bad":
            high = at
        else:
            undecided.add(at)
    return Fall(
        good=first,
        bad=last,
        fell=fell,
        tested=tuple(found.measured),
        last_good=low,
        first_bad=high,
        direction=better,
    )


def fallen(
    reference: Reference, limits: Limits, direction: float | None = None
) -> Plan[tuple[Interval, float]]:
    """By how much the bad one is worse, and which direction is better: 1, more, or -1, less.

    `direction` says so where it is known; None: what is good says so.
    """
    draws = limits.draws
    while True:
        good, bad = yield from both(reference, draws)
        rows = paired(good, bad)
        better = direction or (1.0 if sum(g - b for g, b in rows) >= 0 else -1.0)
        fell = interval_of([better * (g - b) for g, b in rows])
        if fell.low > 0 or draws >= limits.draws_max or len(good) < draws:
            return fell, better
        draws = min(2 * draws, limits.draws_max)


def _next(low: int, high: int, undecided: Collection[int], kept: Collection[int]) -> int | None:
    """The version to ask: next to the middle, or one near it that is kept; None: there is none."""
    between = [at for at in range(low + 1, high) if at not in undecided]
    if not between:
        return None

    def far(at: int) -> float:
        return abs(at - (low + high) / 2)

    near = [at for at in between if at in kept and far(at) <= FIT * (high - low)]
    return min(near or between, key=lambda at: (far(at), at))
