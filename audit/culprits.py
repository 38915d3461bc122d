"""Which groups did it: steps are trained again without sets of suspects, which are halved; pure.

1. Where one suspect stands out from all others, it is tried alone.
2. Without all suspects: where the value stays bad, none of them explains it.
3. As if it was one: halves, of which one is tried; the other is gone on with where that does not
   suffice. What is left is tried alone.
4. If that was not enough, it was several. The smallest set is looked for as Zeller and Hildebrandt
   do ("Simplifying and Isolating Failure-Inducing Input", 2002: ddmin): a part that suffices is
   gone on with, parts that suffice together only are made smaller from the other side.

Effects of rows need not add up for that: every set that is named has a trial of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dora_pipe.audit.bisect import Comparison, Limits, Measured, Plan, Reference, Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A group, or a trajectory, that may have done it.

    Example: ``Suspect(name="g0000003871", step=96, deviations=12.0, reasons=("reward -1000",))``
    """

    name: str
    step: int
    deviations: float
    """How far it stands out, in standard deviations; above 0."""
    reasons: Sequence[str] = ()

    @property
    def weight(self) -> float:
        """What it counts where suspects are halved."""
        return 1.0 + self.deviations**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """What the trials came to."""

    suspects: Sequence[Suspect]
    trials: Sequence[Measured]
    """In the order in which they were made."""
    cause: Sequence[Suspect]
    """Without these the value recovers; empty: without all suspects it does not."""
    proof: Measured | None
    """The trial without the cause; without all suspects where there is none."""
    smallest: bool
    """Whether no part of the cause suffices; else the steps did not suffice to say so."""
    inside: Suspect | None
    """A trajectory of the cause, without which alone the value recovers."""
    steps: int
    """Trained again."""


@dataclass(slots=True)
class _Trials:
    """What was tried, and how many steps may still be trained again."""

    comparison: Comparison
    last: int
    left: int
    over: bool = False
    """Whether a trial was not made for want of steps."""
    tried: dict[frozenset[str], Measured] = field(default_factory=dict)

    def recovers(self, without: Sequence[Suspect]) -> Plan[bool]:
        """Whether the value is good again without these."""
        names = frozenset(one.name for one in without)
        if names not in self.tried:
            first = min(one.step for one in without)
            trial = Trial(first=first, last=self.last, without=names)
            if trial.steps > self.left:
                self.over = True
                return False
            self.left -= trial.steps
            self.tried[names] = yield from self.comparison.judge(trial)
        return self.tried[names].verdict == "good"

    def of(self, without: Sequence[Suspect]) -> Measured | None:
        """The trial of a set, if it was made."""
        return self.tried.get(frozenset(one.name for one in without))

    def best(self, suspects: Sequence[Suspect]) -> Sequence[Suspect]:
        """The smallest set so far without which the value recovers; all, where there is none."""
        sets = [names for names, one in self.tried.items() if one.verdict == "good"]
        names = min(sets, key=len, default=frozenset(one.name for one in suspects))
        return [one for one in suspects if one.name in names]


def explain(
    suspects: Sequence[Suspect],
    reference: Reference,
    *,
    last: int,
    limits: Limits,
    direction: float,
    siblings: dict[str, Sequence[Suspect]],
) -> Plan[Explanation]:
    """Find the smallest set of suspects without which steps up to `last` come to what is good.

    `siblings` has the trajectories of each suspected group. Example::

        explain([Suspect(name="g1", step=9, deviations=5.0)], reference, last=10, ...)
    """
    ranked = tuple(sorted(suspects, key=lambda one: (-one.deviations, one.name)))
    trials = _Trials(Comparison(reference, limits, direction), last, limits.steps)
    cause: Sequence[Suspect] = ()
    if ranked:
        if stands_alone(ranked) and (yield from trials.recovers(ranked[:1])):
            cause = ranked[:1]
        else:
            whole = yield from trials.recovers(ranked)
            tried = trials.of(ranked)
            if tried is not None and tried.verdict != "bad":
                cause = yield from _one(trials, ranked)
            if whole and not cause:
                cause = yield from _smallest(trials, trials.best(ranked))
    over = trials.over
    inside = (yield from _inside(trials, siblings.get(cause[0].name, ()))) if cause else None
    return Explanation(
        suspects=ranked,
        trials=tuple(trials.comparison.measured),
        cause=cause,
        proof=trials.of(cause or ranked) if ranked else None,
        smallest=not over,
        inside=inside,
        steps=limits.steps - trials.left,
    )


def stands_alone(ranked: Sequence[Suspect]) -> bool:
    """Whether the first stands out more, by variance, than all others together."""
    return ranked[0].deviations ** 2 >= sum(one.deviations**2 for one in ranked[1:])


def _one(trials: _Trials, found: Sequence[Suspect]) -> Plan[Sequence[Suspect]]:
    """The one that did it, if it was one; else none."""
    while len(found) > 1 and not trials.over:
        part, other = halves(found)
        found = part if (yield from trials.recovers(part)) else other
    return found if (yield from trials.recovers(found)) else ()


def _smallest(trials: _Trials, found: Sequence[Suspect]) -> Plan[Sequence[Suspect]]:
    """A part of these, without which the value recovers too, and no part of that does."""
    parts = halves(found)
    while len(found) > 1 and not trials.over:
        for part in _tries(parts):
            if (yield from trials.recovers(part)):
                found, parts = part, halves(part)
                break
        else:
            if all(len(part) == 1 for part in parts):
                break
            parts = [half for part in parts for half in halves(part)]
    return trials.best(found)


def _tries(parts: Sequence[Sequence[Suspect]]) -> Iterator[Sequence[Suspect]]:
    """Every part, then all but every part, which is another part where there are two."""
    yield from parts
    if len(parts) > 2:
        for left_out in parts:
            yield [one for part in parts if part is not left_out for one in part]


def halves(suspects: Sequence[Suspect]) -> list[Sequence[Suspect]]:
    """Two parts of about equal weight, each with one at least; one suspect is a part.

    Example: weights 9, 3, 2, 1 give the first alone, and the others.
    """
    half, sofar, at = sum(one.weight for one in suspects) / 2, 0.0, 0
    while at < len(suspects) - 1 and (sofar < half or not at):
        sofar += suspects[at].weight
        at += 1
    return [part for part in (suspects[:at], suspects[at:]) if part]


def _inside(trials: _Trials, siblings: Sequence[Suspect]) -> Plan[Suspect | None]:
    """One trajectory that stands out among its siblings, if it alone suffices."""
    if not siblings:
        return None
    ranked = sorted(siblings, key=lambda one: (-one.deviations, one.name))
    if not stands_alone(ranked):
        return None
    return ranked[0] if (yield from trials.recovers(ranked[:1])) else None
