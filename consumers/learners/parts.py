"""Steps whose batch comes in parts, computed speculatively.

With one update per step, part gradients add up and are divided once. With several, each part is an
update, and the learner keeps its prior state until the step ends or restarts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from dora_pipe.consumers.learners.learner import Settings, StepResult, TrainBatch
from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.learners.step import (
    Item,
    Pass,
    items_of,
    minibatches,
    part_passes,
    passes_of,
)
from dora_pipe.consumers.learners.step_metrics import Sums, contribution, metrics_of
from dora_pipe.consumers.objectives.registry import needs_proximal


@dataclass(frozen=True, slots=True, kw_only=True)
class PartKey:
    """Inputs of a part's result, besides the weights."""

    step: int
    groups: tuple[str, ...]
    settings: tuple[tuple[str, float | int | str | bool], ...]

    @classmethod
    def of(cls, part: TrainBatch, settings: Settings) -> PartKey:
        groups = tuple(group.group for group in part.groups)
        return cls(step=part.step, groups=groups, settings=tuple(sorted(settings.items())))


@dataclass(frozen=True, slots=True, kw_only=True)
class DonePart:
    """A computed part: a gradient or an update."""

    key: PartKey
    items: Sequence[Item]
    sums: Sums
    compute_s: float
    divisor: int = 0


class ComputesParts(Protocol):
    """Operations of a learner for a step in parts."""

    def stopwatch(self) -> Callable[[], float]:
        """Return a clock of compute seconds."""
        ...

    def settings_of(self, settings: Settings) -> StepSettings: ...

    def gather(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, before: int
    ) -> Sums:
        """Add the gradient of these passes to that of `before` earlier ones."""
        ...

    def finish(self, divisor: int, step: StepSettings, sums: Sums) -> None:
        """Divide the gathered gradient and update. Raises NonFinite."""
        ...

    def update(
        self, part: TrainBatch, passes: Sequence[Pass], settings: Settings, *, later: bool
    ) -> Sums:
        """Run one update; `later` takes proximal log-probs from kept weights. Raises NonFinite."""
        ...

    def keep(self) -> None:
        """Copy weights and optimizer state."""
        ...

    def restore_copy(self) -> None:
        """Restore the copy, bit for bit, and free it."""
        ...

    def free_copy(self) -> None: ...


class StepInParts:
    def __init__(self) -> None:
        self._done: list[DonePart] = []
        self._kept = False

    @property
    def begun(self) -> bool:
        """Return whether the next step has speculative parts."""
        return bool(self._done)

    def forget(self, learner: ComputesParts) -> None:
        """Discard speculative work."""
        self._done = []
        if self._kept:
            self._kept = False
            learner.restore_copy()

    def settle(self, learner: ComputesParts) -> None:
        """Restore weights and optimizer state before the step; a gradient may remain."""
        if self._kept:
            self.forget(learner)

    def loaded(self) -> None:
        """Reset after loading other weights."""
        self._done, self._kept = [], False

    def add(self, learner: ComputesParts, part: TrainBatch, settings: Settings) -> None:
        """Compute the next part of a step. Raises NonFinite."""
        key = PartKey.of(part, settings)
        if not self._continues(key):
            self.forget(learner)
        step = learner.settings_of(settings)
        if step.minibatches == 1:
            self._gather(learner, part, key, settings)
            return
        self._keep(learner)
        self._update(learner, part, key, settings, count=1)

    def train(self, learner: ComputesParts, batch: TrainBatch, settings: Settings) -> StepResult:
        """Run one update from all parts, or one per part. Raises NonFinite."""
        step, parts = learner.settings_of(settings), batch.in_parts()
        updates = step.minibatches
        keys = [PartKey.of(part, settings) for part in parts]
        # With several updates the last part depends on the whole batch.
        usable = len(keys) if updates == 1 else len(keys) - 1
        if not self._done or [done.key for done in self._done] != keys[:usable][: len(self._done)]:
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
        items = in_dispatch_order(item for part in done for item in part.items)
        sums = Sums()
        for done_part in done:
            sums.add(done_part.sums)
        if updates == 1:
            _finish(learner, max(1, sum(part.divisor for part in done)), step, sums, items)
        elif self._kept:
            self._kept = False
            learner.free_copy()
        return StepResult(
            metrics=metrics_of(items, sums, step),
            contributions=[contribution(item) for item in items],
            compute_s=sum(part.compute_s for part in done) + clock() - start_s,
        )

    def _continues(self, key: PartKey) -> bool:
        if not self._done:
            return False
        first, held = self._done[0].key, {name for part in self._done for name in part.key.groups}
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
        before = sum(part.sums.passes for part in self._done)
        passes, divisor = part_passes(items, step, first=before)
        # Cleared meanwhile: after an error the gradient is incomplete.
        done, self._done = self._done, []
        sums = learner.gather(part, passes, settings, before=before) if passes else Sums()
        seconds = clock() - start_s
        done_part = DonePart(key=key, items=items, sums=sums, compute_s=seconds, divisor=divisor)
        self._done = [*done, done_part]

    def _update(
        self, learner: ComputesParts, part: TrainBatch, key: PartKey, settings: Settings, count: int
    ) -> None:
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
        done_part = DonePart(key=key, items=items, sums=sums, compute_s=clock() - start_s)
        self._done = [*done, done_part]


def _finish(
    learner: ComputesParts, divisor: int, step: StepSettings, sums: Sums, items: Sequence[Item]
) -> None:
    sums.loss /= divisor
    sums.router_aux /= divisor
    if sums.passes:
        learner.finish(divisor, step, sums)
    for item in items:
        item.divide_loss(divisor)


def in_dispatch_order(items: Iterable[Item]) -> list[Item]:
    """Return items in unsplit batch order, so that metrics do not depend on parts."""
    return sorted(items, key=lambda item: (item.ordinal, item.sample))
