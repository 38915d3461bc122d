"""Measures what the plans of `bisect` ask for: makes the weights, asks the probe, remembers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from dora_pipe.audit.bisect import (
    Ask,
    Fall,
    Limits,
    Plan,
    Reference,
    Subject,
    Trial,
    Values,
    Version,
    carry_out,
    fallen,
)
from dora_pipe.audit.culprits import Explanation, explain
from dora_pipe.audit.probed_file import ProbedFile
from dora_pipe.audit.repeat_steps import MadeWeights, StepRepeater
from dora_pipe.audit.suspects import siblings_of, suspects_of
from dora_pipe.core.errors import UsageError

T = TypeVar("T")

Weights = Callable[[Subject], tuple[Path, MadeWeights]]
"""The file of a subject, and what it is."""


class DrawnValues(Protocol):
    """What gives a value for every draw; draw i is of the same row and seed for all weights."""

    def values(self, weights: Path, made: MadeWeights, first: int, last: int) -> Values:
        """Of draws `first` .. `last - 1`; fewer where there are no more."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """Carries plans out. Example: ``fall = measuring.run(search(80, 120, limits))``."""

    probe: DrawnValues
    file: ProbedFile
    weights: Weights
    told: Callable[[str], None] = lambda words: None
    """Hears of what is asked."""

    def run(self, plan: Plan[T]) -> T:
        """Give a plan what it asks for until it has come to its end."""
        return carry_out(plan, self.values)

    def values(self, ask: Ask) -> Values:
        """What the probe says of the draws that are wanted; what is known is not asked again."""
        left = self.file.left(ask)
        if left:
            self.told(ask.subject.words)
            weights, made = self.weights(ask.subject)
            values = self.probe.values(weights, made, left.start, left.stop)
            if not left.start and not values:
                raise UsageError(f"the probe says nothing of {ask.subject.words}")
            self.file.add(ask, values)
        return self.file.of(ask)


def look_into(
    fall: Fall,
    measuring: Measuring,
    repeater: StepRepeater,
    limits: Limits,
    *,
    steps: int,
) -> Explanation:
    """Which groups of the step that made the fall, or of those before it, did it.

    `steps` are committed. Raises what `StepRepeater` does.
    """
    first = max(fall.last_good - limits.before, _number(fall.good.subject))
    made_by = fall.first_bad - 1
    rows = repeater.rows(first, made_by)
    suspects = suspects_of(rows, limits.suspects)
    reference = Reference(good=Version(fall.last_good), bad=Version(fall.first_bad))
    last = made_by
    for end in range(min(made_by + limits.after, steps - 1), made_by - 1, -1):
        worse = Reference(good=reference.good, bad=_as_it_was(repeater, first, end))
        fell, _ = measuring.run(fallen(worse, limits, fall.direction))
        if fell.low > 0:
            reference, last = worse, end
            break
    return measuring.run(
        explain(
            suspects,
            reference,
            last=last,
            limits=limits,
            direction=fall.direction,
            siblings={one.name: siblings_of(rows, one.name) for one in suspects},
        )
    )


def _as_it_was(repeater: StepRepeater, first: int, last: int) -> Subject:
    """What steps up to `last` come to with every row: what the run has, where this machine makes
    the same; a trial is never held against bits of other numerics."""
    if repeater.other_numerics:
        return Trial(first=first, last=last)
    return Version(last + 1)


def _number(subject: Subject) -> int:
    return subject.version if isinstance(subject, Version) else subject.first
