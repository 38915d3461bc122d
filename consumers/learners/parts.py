"""A step whose batch comes in parts: what was computed ahead, and what of it a batch may use.

With one update per step the gradient of a part is added to that of the parts before it, and all of
it is divided once. With as many updates as parts each part is one: what was computed ahead is then
weights and optimizer state that no version has, and the learner keeps those that the step begins
with, until it is over or has to be begun anew.

What computes is the learner's; here is decided when, in which order, and what is begun anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dora_pipe.consumers.learners.port import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.learners.step import (
    Item,
    Pass,
    items_of,
    minibatches,
    part_passes,
    passes_of,
)
from dora_pipe.consumers.learners.step_figures import Sums, contribution, figures_of
from dora_pipe.consumers.objectives.registry import needs_proximal


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """What a part comes to depends on, beside the weights."""

    step: int
    groups: tuple[str, ...]
    settings: tuple[tuple[str, float | int | str | bool], ...]

    @classmethod
    def of(cls, part: TrainBatch, settings: Settings) -> PartKey:
        """Of these groups under these settings."""
        groups = tuple(group.group for group in part.groups)
        return cls(step=part.step, groups=groups, settings=tuple(sorted(settings.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class DonePart:
    """A part whose gradient was added to those of the parts before it, or that was an update."""

    key: PartKey
    items: Sequence[Item]
    sums: Sums
    compute_s: float
    divisor: int = 0
    """Its share of what the whole gradient is divided by."""


class ComputesParts(Protocol):
    """What a learner does for a step in parts."""

    def stopwatch(self) -> Callable[[], float]:
        """Seconds of computing, for differences."""
        ...

    def settings_of(self, settings: Settings) -> StepSettings:
        """What is in force for a step."""
        ...

    def gather(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, before: int
    ) -> Sums:
        """Add the gradient of these passes to that of so many before; 0: to nothing."""
        ...

    def finish(self, divisor: int, step: StepSettings, sums: Sums) -> None:
        """Divide the gradient that is there and update with it. Raises NonFinite."""
        ...

    def update(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, later: bool
    ) -> Sums:
        """One update; `later`: where the objective needs the log-probs of the step's first weights,
        they are those that are kept. Raises NonFinite."""
        ...

    def keep(self) -> None:
        """Keep a copy of weights and optimizer state as they are."""
        ...

    def go_back(self) -> None:
        """Be as the copy is, bit for bit, and let it go."""
        ...

    def let_go(self) -> None:
        """The copy is not needed any more."""
        ...


class StepInParts:
    """See the module. Example: ``StepInParts().train(learner, batch, settings).figures["loss"]``"""

    def __init__(self) -> None:
        self._done: list[DonePart] = []
        """The first parts of the next step."""
        self._kept = False
        """Whether the learner keeps what the step begins with."""

    @property
    def begun(self) -> bool:
        """Whether something was computed ahead, which the next step may go on from."""
        return bool(self._done)

    def forget(self, learner: ComputesParts) -> None:
        """What was computed ahead is nobody's any more."""
        self._done = []
        if self._kept:
            self._kept = False
            learner.go_back()

    def settle(self, learner: ComputesParts) -> None:
        """Weights and optimizer state are to be what the step begins with; a gradient may stay."""
        if self._kept:
            self.forget(learner)

    def loaded(self) -> None:
        """The learner has other weights, and keeps nothing."""
        self._done, self._kept = [], False

    def add(self, learner: ComputesParts, part: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step, ahead of its batch. Raises NonFinite."""
        key = PartKey.of(part, settings)
        if not self._goes_on(key):
            self.forget(learner)
        step = learner.settings_of(settings)
        if step.minibatches == 1:
            self._gather(learner, part, key, settings)
            return
        self._keep(learner)
        self._update(learner, part, key, settings, count=1)

    def train(self, learner: ComputesParts, batch: TrainBatch, settings: Settings) -> StepResult:
        """One update from the sums of all parts, or one from each. Raises NonFinite."""
        step, parts = learner.settings_of(settings), batch.in_parts()
        updates = step.minibatches
        keys = [PartKey.of(part, settings) for part in parts]
        # What the batch leaves to its last part is known with the batch only.
        usable = len(keys) if updates == 1 else len(keys) - 1
        if not self._done or [one.key for one in self._done] != keys[:usable][: len(self._done)]:
            self.forget(learner)
        if updates > 1 and needs_proximal(step.objective):
            self._keep(learner)
        for part, key in list(zip(parts, keys, strict=True))[len(self._done) :]:
            if updates == 1:
                self._gather(learner, part, key, settings)
            else:
                last = len(self._done) == len(parts) - 1
                count = updates - len(self._done) if last else 1
                self._update(learner, part, key, settings, count=count)
        clock = learner.stopwatch()
        start_s = clock()
        done, self._done = self._done, []
        items = in_dispatch_order(item for one in done for item in one.items)
        sums = Sums()
        for one in done:
            sums.add(one.sums)
        if updates == 1:
            _finish(learner, max(1, sum(one.divisor for one in done)), step, sums, items)
        elif self._kept:
            self._kept = False
            learner.let_go()
        return StepResult(
            figures=figures_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=sum(one.compute_s for one in done) + clock() - start_s,
        )

    def _goes_on(self, key: PartKey) -> bool:
        """Whether a part may follow those that are there; none does that was given up with them and
        is taken anew."""
        if not self._done:
            return False
        first, held = self._done[0].key, {name for one in self._done for name in one.key.groups}
        same = (first.step, first.settings) == (key.step, key.settings)
        return same and held.isdisjoint(key.groups)

    def _keep(self, learner: ComputesParts) -> None:
        if not self._kept:
            learner.keep()
            self._kept = True

    def _gather(
        self, learner: ComputesParts, part: TrainBatch, key: PartKey, settings: Settings
    ) -> None:
        step, clock = learner.settings_of(settings), learner.stopwatch()
        start_s = clock()
        items = [item for group in items_of(part, step) for item in group]
        before = sum(one.sums.passes for one in self._done)
        passes, divisor = part_passes(items, step, first=before)
        # Until it is whole: with half a part the gradient is nobody's.
        done, self._done = self._done, []
        sums = learner.gather(part, passes, settings, before=before) if passes else Sums()
        seconds = clock() - start_s
        found = DonePart(key=key, items=items, sums=sums, compute_s=seconds, divisor=divisor)
        self._done = [*done, found]

    def _update(
        self, learner: ComputesParts, part: TrainBatch, key: PartKey, settings: Settings, count: int
    ) -> None:
        """The next `count` updates, or fewer, from the groups of a part."""
        step, clock = learner.settings_of(settings), learner.stopwatch()
        start_s = clock()
        groups = items_of(part, step)
        done, self._done = self._done, []
        sums = Sums()
        for number, dealt in enumerate(minibatches(groups, count), start=len(done)):
            passes = passes_of([item for group in dealt for item in group], number, step)
            if passes:
                sums.add(learner.update(part, passes, settings, later=number > 0))
        items = [item for group in groups for item in group]
        found = DonePart(key=key, items=items, sums=sums, compute_s=clock() - start_s)
        self._done = [*done, found]


def _finish(
    learner: ComputesParts, divisor: int, step: StepSettings, sums: Sums, items: Sequence[Item]
) -> None:
    """The one update of a step whose gradient is there."""
    sums.loss /= divisor
    sums.router_aux /= divisor
    if sums.passes:
        learner.finish(divisor, step, sums)
    for item in items:
        item.divide_loss(divisor)


def in_dispatch_order(items: Iterable[Item]) -> list[Item]:
    """As in a batch that is one: what a step says of itself does not depend on its parts."""
    return sorted(items, key=lambda item: (item.ordinal, item.sibling))
