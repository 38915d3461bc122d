"""The batches of a run whose groups are taken again, under other rewards and other rules; pure.

1. A group is there from the round on in which it ended in the source. What it has come to follows
   from its rewards as they are now (`rescoring.fate_of`); what would be trained can be taken.
2. The batch of step s is taken no earlier than the source took its own of s: so many groups with
   the earliest deadlines, as in any run (`staleness.next_batch`), of those that are there, are not
   taken, are not beyond their deadlines and know no version behind s. What the source has trained
   before the first step is taken.
3. Where fewer are there, the step waits for those that end next, as a trainer does, and the steps
   behind it are taken no earlier than it. The first step that waits in vain is the end.
4. Where the source took a part of a batch, a part is taken (`staleness.next_part`).

A live run takes no batch behind which a deadline could not be kept, since it abandons nothing.
Nobody promises that to the groups here: they were sampled whatever becomes of them, and there may
be more than steps have room for. Those that no step has taken by their deadlines are left over.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from dora_pipe.config.model import Groups
from dora_pipe.consumers.trainer.changed_batch import BatchChange
from dora_pipe.orchestrator.staleness import Finished, next_batch, next_part
from dora_pipe.schemas.control import TakenGroup

AGAIN_KEYS: Final = frozenset(
    {"groups.per_step", "groups.filter_zero_advantage", "groups.min_valid_siblings"}
)
"""Keys of a configuration that may be others where batches are taken again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroup:
    """A group of the source that was trained, filtered, or failed by what its siblings were."""

    taken: TakenGroup
    ordinal: int
    size: int
    """Siblings that it is complete with."""
    rewards: Mapping[str, float | None]
    """Of its siblings that count, by trajectory, as they counted then."""
    ended: int
    """The round in which it came to its end."""
    newest: int
    """The newest version that its tokens may be of: its own, or a later one where running requests
    went on under that."""
    step: int | None
    """That trained it in the source."""

    @property
    def key(self) -> Finished:
        """Its place among those that can be taken."""
        return Finished(self.taken.deadline, self.ordinal, self.taken.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceStep:
    """When a committed step of the source was taken."""

    step: int
    round: int
    """Of its batch."""
    parts: tuple[int, ...] = ()
    """Of those of its parts that were taken before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedGroups:
    """What batches can be taken again from. Example: ``ended_groups(bus, topics, first=12)``."""

    groups: Sequence[EndedGroup]
    """By the round in which they ended, then in the order of their dispatch."""
    steps: Sequence[SourceStep]
    """From the first that is to be taken again on, in order."""
    rounds: int
    """How many rounds of the source were read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTaken:
    """The batch of a step."""

    step: int
    groups: tuple[TakenGroup, ...]
    """In the order in which they were taken."""
    parts: tuple[int, ...] = ()
    """As in `TakeBatch.parts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideSource:
    """What is otherwise in batches that were taken again, in groups."""

    groups: int
    """That were taken."""
    untrained: int
    """Of these, those that the source has not trained."""
    moved: int
    """Of these, those that it trained at another step."""
    left: int
    """Those that it trained at the same steps, and that were not taken."""


def taken_again(
    source: EndedGroups, rules: Groups, change: BatchChange, *, parts: int = 1
) -> Iterator[BatchTaken]:
    """The batches from the first of `source.steps` on, for as long as there are whole ones.

    `rules` are those of the new run, `parts` is its `trainer.parts`.
    """
    if not source.steps:
        return
    first, groups = source.steps[0].step, source.groups
    found = [one for one in groups if (one.step is None or one.step >= first)]
    queue = _Queue([one for one in found if _is_trained(one, rules, change)], rules.per_step)
    size = max(1, rules.per_step // parts)
    for step in source.steps:
        batch = queue.batch(step, size)
        if batch is None:
            return
        yield batch


def rules_of(groups: Groups) -> dict[str, int | bool]:
    """What of a configuration decides which batches are taken again: `AGAIN_KEYS`."""
    return {key: getattr(groups, key.removeprefix("groups.")) for key in sorted(AGAIN_KEYS)}


def beside_source(source: EndedGroups, batches: Sequence[BatchTaken]) -> BesideSource:
    """Hold batches against those of the source of the same steps."""
    steps = {one.step for one in batches}
    before = {one.taken.group: one.step for one in source.groups}
    now = {group.group: one.step for one in batches for group in one.groups}
    untrained = sum(before[name] is None for name in now)
    return BesideSource(
        groups=len(now),
        untrained=untrained,
        moved=sum(before[name] != step for name, step in now.items()) - untrained,
        left=sum(step in steps and name not in now for name, step in before.items()),
    )


def rewards_now(group: EndedGroup, change: BatchChange) -> list[float | None]:
    """What its siblings are worth now, in order; None for those that do not count."""
    return [
        None if name in change.without else change.rewards.get(name, reward)
        for name, reward in group.rewards.items()
    ]


def _is_trained(group: EndedGroup, rules: Groups, change: BatchChange) -> bool:
    if group.taken.group in change.without:
        return False
    return fate_of(rewards_now(group, change), group.size, rules) == "trained"


class _Queue:
    """The groups that can be taken, while steps take them."""

    def __init__(self, groups: Sequence[EndedGroup], per_step: int) -> None:
        self._later = sorted(groups, key=lambda one: (one.ended, one.ordinal), reverse=True)
        """Those that have not ended, the next one last."""
        self._groups = {one.taken.group: one for one in groups}
        self._ready: list[Finished] = []
        self._per_step = per_step
        self._now = -1
        """The round that the run has come to."""

    def batch(self, at: SourceStep, size: int) -> BatchTaken | None:
        """The batch of a step, with parts of this size; None where none becomes whole."""
        parts: list[int] = []
        held: list[Finished] = []
        for round_ in at.parts:
            if round_ >= self._now and (part := self._part(at.step, round_, len(held), size)):
                held += part
                parts.append(len(part))
        self._go_on_to(at.round)
        rest = self._rest(at.step, len(held))
        if not rest:
            return None
        names = [one.group for one in (*held, *rest)]
        groups = tuple(self._groups[one].taken for one in names)
        return BatchTaken(step=at.step, groups=groups, parts=tuple(parts))

    def _part(self, step: int, round_: int, taken: int, size: int) -> Sequence[Finished]:
        self._go_on_to(round_)
        ready = self._takeable(step)
        due = _due(ready[:size], step, taken)
        part = next_part(ready, due, step=step, per_step=self._per_step, taken=taken, size=size)
        self._take(part)
        return part

    def _rest(self, step: int, taken: int) -> Sequence[Finished]:
        """What makes a batch whole, once that is there."""
        lacks = self._per_step - taken
        ready = self._takeable(step)
        if len(ready) < lacks:
            coming = [
                one for one in reversed(self._later) if one.newest <= step <= one.taken.deadline
            ]
            if len(ready) + len(coming) < lacks:
                return ()
            self._go_on_to(coming[lacks - len(ready) - 1].ended)
            ready = self._takeable(step)
        due = _due(ready[:lacks], step, taken)
        batch = next_batch(ready, due, step=step, per_step=self._per_step, taken=taken)
        self._take(batch)
        return batch

    def _go_on_to(self, round_: int) -> None:
        """What has ended by then is there; a round before changes nothing."""
        self._now = max(self._now, round_)
        while self._later and self._later[-1].ended <= self._now:
            insort(self._ready, self._later.pop().key)

    def _takeable(self, step: int) -> list[Finished]:
        self._ready = [one for one in self._ready if one.deadline >= step]
        return [one for one in self._ready if self._groups[one.group].newest <= step]

    def _take(self, groups: Collection[Finished]) -> None:
        gone = frozenset(groups)
        self._ready = [one for one in self._ready if one not in gone]


def _due(groups: Sequence[Finished], step: int, taken: int) -> Counter[int]:
    """By deadline, the groups that are taken, those of parts due at the step: nobody is promised
    that what stays behind is trained, so it holds no batch back."""
    found = Counter(one.deadline for one in groups)
    if taken:
        found[step] += taken
    return found


def fate_of(rewards: Sequence[float | None], size: int, rules: Groups) -> str:
    """Return the outcome of a group whose trajectories have all ended."""
    valid = [one for one in rewards if one is not None]
    if len(valid) < min(rules.min_valid_siblings, size):
        return "failed"
    return "filtered" if rules.filter_zero_advantage and len(set(valid)) <= 1 else "trained"
