"""A step whose batch comes in parts: what was computed ahead, and what of it a batch may use.

The gradient of a part is added to that of the parts before it, and all of it is divided once. What
computes is the learner's; here is decided when, in which order, and what is begun anew.
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
    Sums,
    contribution,
    figures_of,
    items_of,
    part_passes,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """What the gradient of a part depends on, beside the weights."""

    step: int
    groups: tuple[str, ...]
    settings: tuple[tuple[str, float | int | str | bool], ...]

    @classmethod
    def of(cls, part: TrainBatch, settings: Settings) -> PartKey:
        """Of these groups under these settings."""
        groups = tuple(group.group for group in part.groups)
        return cls(step=part.step, groups=groups, settings=tuple(sorted(settings.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredPart:
    """A part whose gradient was added to those of the parts before it."""

    key: PartKey
    items: Sequence[Item]
    divisor: int
    """Its share of what the whole gradient is divided by."""
    sums: Sums
    compute_s: float


class GathersGradient(Protocol):
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


class StepInParts:
    """See the module. Example: ``StepInParts().train(learner, batch, settings).figures["loss"]``"""

    def __init__(self) -> None:
        self._gathered: list[GatheredPart] = []
        """The first parts of the next step; their gradient lies in the learner."""

    def forget(self) -> None:
        """What was computed ahead is nobody's any more."""
        self._gathered = []

    def add(self, learner: GathersGradient, part: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step, ahead of its batch. Raises NonFinite."""
        key = PartKey.of(part, settings)
        if self._gathered and self._gathered[0].key.step != key.step:
            self.forget()
        self._gather(learner, part, key, settings)

    def train(self, learner: GathersGradient, batch: TrainBatch, settings: Settings) -> StepResult:
        """One update, from the sums of all parts. Raises NonFinite."""
        step, parts = learner.settings_of(settings), batch.in_parts()
        keys = [PartKey.of(part, settings) for part in parts]
        if [one.key for one in self._gathered] != keys[: len(self._gathered)]:
            self.forget()
        for part, key in list(zip(parts, keys, strict=True))[len(self._gathered) :]:
            self._gather(learner, part, key, settings)
        clock = learner.stopwatch()
        start_s = clock()
        gathered, self._gathered = self._gathered, []
        divisor = max(1, sum(one.divisor for one in gathered))
        sums = Sums(
            loss=sum(one.sums.loss for one in gathered) / divisor,
            padded_tokens=sum(one.sums.padded_tokens for one in gathered),
        )
        if any(one.sums.passes for one in gathered):
            learner.finish(divisor, step, sums)
        items = in_dispatch_order(item for one in gathered for item in one.items)
        for item in items:
            item.divide_loss(divisor)
        return StepResult(
            figures=figures_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=sum(one.compute_s for one in gathered) + clock() - start_s,
        )

    def _gather(
        self, learner: GathersGradient, part: TrainBatch, key: PartKey, settings: Settings
    ) -> None:
        step = learner.settings_of(settings)
        clock = learner.stopwatch()
        start_s = clock()
        items = [item for group in items_of(part, step) for item in group]
        before = sum(one.sums.passes for one in self._gathered)
        passes, divisor = part_passes(items, step, first=before)
        # Until it is whole: with half a part the gradient is nobody's.
        gathered, self._gathered = self._gathered, []
        sums = learner.gather(part, passes, settings, before=before) if passes else Sums()
        self._gathered = [
            *gathered,
            GatheredPart(
                key=key,
                items=items,
                divisor=divisor,
                sums=sums,
                compute_s=clock() - start_s,
            ),
        ]


def in_dispatch_order(items: Iterable[Item]) -> list[Item]:
    """As in a batch that is one: what a step says of itself does not depend on its parts."""
    return sorted(items, key=lambda item: (item.ordinal, item.sibling))
