"""What a run would have been under other rewards of its texts: fates of groups, advantages, curves.

Pure: it is given what the log says and what the rewards are now. A group's siblings are those that
counted; which groups made which batch stays as it was, since other fates would have made other
batches. What is said is where the rewards would have mattered, not what would have come of it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from statistics import fmean
from typing import Any

from dora_pipe.config.model import Groups
from dora_pipe.consumers.learners.settings import advantage_rule
from dora_pipe.consumers.objectives.advantage import batch_advantages

Rewards = Sequence[float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group that has ended, with both rewards of the siblings that count."""

    group: str
    version: int
    size: int
    fate: str
    """`trained`, `filtered`, `failed` or `evaluated`, as the log has it."""
    step: int
    """That trained it; else the first one whose batch was taken behind its end."""
    evaluation: str
    trajectories: tuple[str, ...]
    old: tuple[float | None, ...]
    new: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangedGroup:
    """A group that would have another fate. Example: ``ChangedGroup(group="g0000000042", step=3,
    old="trained", new="filtered")``."""

    group: str
    step: int
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """Means of a step's trained trajectories, or of an evaluation of a version."""

    name: str
    """Of the evaluation; empty where that has none, and of a step."""
    at: int
    """The step, or the version."""
    trajectories: int
    old: float | None
    new: float | None
    signs: int
    """Advantages whose sign is another one; 0 of an evaluation."""
    fates: int
    """Groups whose fate is another one; 0 of an evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A trajectory and its rewards. Example: ``Example(trajectory="g0000000042-003", old=1.0,
    new=0.0)``."""

    trajectory: str
    old: float | None
    new: float | None

    @property
    def distance(self) -> float:
        """How far the two are apart; one that is missing is farther than any number."""
        if self.old is None or self.new is None:
            return 0.0 if self.old is self.new else math.inf
        return abs(self.new - self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """What is otherwise under the other reward."""

    trajectories: int
    """That count and have been scored."""
    differ: int
    """Whose reward is another one."""
    old: float | None
    """Mean of the training rewards then."""
    new: float | None
    fates: tuple[ChangedGroup, ...]
    """Groups whose fate is another one, by step."""
    advantages: int
    """Of trained trajectories."""
    signs: int
    """Whose sign is another one: positive, none, negative."""
    steps: tuple[Beside, ...]
    evaluations: tuple[Beside, ...]
    examples: tuple[Example, ...]
    """Those whose rewards are farthest apart, farthest first; of equals one of every group, and
    training before evaluations."""
    first: int | None
    """The first step at which a fate or an advantage is another one."""

    @property
    def moves(self) -> Mapping[tuple[str, str], int]:
        """Groups by their fate then and now."""
        return Counter((one.old, one.new) for one in self.fates)


def compare(
    groups: Sequence[ScoredGroup],
    rules: Groups,
    settings: Mapping[int, Mapping[str, Any]],
    *,
    examples: int,
) -> Rescoring:
    """Both rewards of a run beside each other; `settings` are the logged ones of every step."""
    train = [one for one in groups if one.fate != "evaluated"]
    changed = tuple(sorted(_fates(train, rules), key=lambda one: (one.step, one.group)))
    stepwise = _Steps(Counter(one.step for one in changed))
    for step, of_step in _by_step(train):
        stepwise.add(step, of_step, settings.get(step, {}))
    differ = _farthest_first(groups)
    return Rescoring(
        trajectories=sum(len(one.trajectories) for one in groups),
        differ=len(differ),
        old=_mean([reward for one in train for reward in one.old]),
        new=_mean([reward for one in train for reward in one.new]),
        fates=changed,
        advantages=stepwise.advantages,
        signs=sum(one.signs for one in stepwise.rows),
        steps=tuple(stepwise.rows),
        evaluations=tuple(_evaluations(groups)),
        examples=tuple(differ[:examples]),
        first=min([one.step for one in changed] + stepwise.differ, default=None),
    )


def fate_of(rewards: Rewards, size: int, rules: Groups) -> str:
    """What becomes of a group whose siblings have all ended (`state_ops.outcome_of`).

    Example: with filtering, ``fate_of([1.0, 1.0], 2, rules) == "filtered"``
    """
    valid = [one for one in rewards if one is not None]
    if len(valid) < min(rules.min_valid_siblings, size):
        return "failed"
    return "filtered" if rules.filter_zero_advantage and len(set(valid)) <= 1 else "trained"


def _farthest_first(groups: Sequence[ScoredGroup]) -> list[Example]:
    """All trajectories whose rewards differ; see `Rescoring.examples`."""
    found: list[tuple[float, int, bool, Example]] = []
    for one in groups:
        both = [
            Example(trajectory=name, old=old, new=new)
            for name, old, new in zip(one.trajectories, one.old, one.new, strict=True)
        ]
        differ = sorted((each for each in both if each.distance), key=lambda each: -each.distance)
        evaluated = one.fate == "evaluated"
        found += [(-each.distance, at, evaluated, each) for at, each in enumerate(differ)]
    return [each for *_, each in sorted(found, key=lambda each: each[:3])]


def _fates(groups: Sequence[ScoredGroup], rules: Groups) -> Iterator[ChangedGroup]:
    for one in groups:
        new = fate_of(one.new, one.size, rules)
        if new != one.fate:
            yield ChangedGroup(group=one.group, step=one.step, old=one.fate, new=new)


def _by_step(groups: Sequence[ScoredGroup]) -> Iterator[tuple[int, list[ScoredGroup]]]:
    trained = sorted((one for one in groups if one.fate == "trained"), key=lambda one: one.step)
    for step, found in groupby(trained, key=lambda one: one.step):
        yield step, list(found)


@dataclass(slots=True)
class _Steps:
    """What is otherwise, step by step."""

    fates: Mapping[int, int]
    rows: list[Beside] = field(default_factory=list)
    differ: list[int] = field(default_factory=list)
    """Steps in which an advantage is another number."""
    advantages: int = 0

    def add(self, step: int, groups: Sequence[ScoredGroup], settings: Mapping[str, Any]) -> None:
        """A trained step, by the rule of advantages that it had."""
        rule = advantage_rule(dict(settings))
        then = batch_advantages([(one.version, one.old) for one in groups], *rule)
        now = batch_advantages([(one.version, one.new) for one in groups], *rule)
        pairs = list(zip(chain(*then), chain(*now), strict=True))
        if any(_sign(old) != _sign(new) or not _close(old, new) for old, new in pairs):
            self.differ.append(step)
        self.advantages += len(pairs)
        signs = sum(_sign(old) != _sign(new) for old, new in pairs)
        self.rows.append(_beside(groups, "", step, signs, self.fates.get(step, 0)))


def _evaluations(groups: Sequence[ScoredGroup]) -> Iterator[Beside]:
    found: defaultdict[tuple[str, int], list[ScoredGroup]] = defaultdict(list)
    for one in groups:
        if one.fate == "evaluated":
            found[one.evaluation, one.version].append(one)
    for (name, version), of_version in sorted(found.items()):
        yield _beside(of_version, name, version, 0, 0)


def _beside(groups: Sequence[ScoredGroup], name: str, at: int, signs: int, fates: int) -> Beside:
    return Beside(
        name=name,
        at=at,
        trajectories=sum(len(one.trajectories) for one in groups),
        old=_mean([reward for one in groups for reward in one.old]),
        new=_mean([reward for one in groups for reward in one.new]),
        signs=signs,
        fates=fates,
    )


def _mean(rewards: Rewards) -> float | None:
    valid = [one for one in rewards if one is not None]
    return fmean(valid) if valid else None


def _sign(advantage: float | None) -> int:
    """None counts as 0: neither has a gradient."""
    return 0 if not advantage else 1 if advantage > 0 else -1


def _close(one: float | None, other: float | None) -> bool:
    return math.isclose(one or 0.0, other or 0.0, rel_tol=1e-9, abs_tol=1e-9)
