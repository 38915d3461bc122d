"""Decides nothing: paradigms that production's planner cannot express, as one small event model.

A pool of workers generates for one trainer. A *unit* is what is admitted, trained or dropped: a
group, or a single sample. There are no versions on workers: every worker serves whatever comes, so
that the figures flatter these paradigms where one worker can host one version only. What they are:

- ``partial``: interruptible rollout on shared GPUs. Generation stops when a batch is complete, the
  GPUs train, the unfinished go on under the new weights after a prefill. Breaks C1.
- ``interruptible``: the same on GPUs of its own: generation stops only to load weights.
- ``roll-flash``: samples by themselves, at most (alpha + 1) batches of them in flight; one that
  would be trained more than alpha versions after its start is dropped. Breaks C2.
- ``drop``: groups that would exceed the bound are dropped, the oldest first (LongCat). Breaks C2.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dora_pipe.core.errors import ResourceError
from dora_pipe.sim.modelled_cluster import ClusterRun, StepSpan
from dora_pipe.sim.modelled_worker import NEVER_S, EngineRates, Sharing, TrainerRates, WorkerSize

EVENTS_MAX = 5_000_000
"""More events than this do not end by themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolPlan:
    """A run of a pool. `in_flight` units are admitted and not yet taken by the trainer, at most."""

    workers: Sequence[WorkerSize]
    rates: EngineRates
    trainer: TrainerRates
    lengths: Callable[[int], Sequence[int]]
    group_size: int
    per_step: int
    """Groups of a step; a step of samples takes `per_step * group_size`."""
    steps: int
    in_flight: int
    """Units admitted and not yet trained; those in training count unless the GPUs are shared."""
    unit: Literal["group", "sample"] = "group"
    shared: bool = False
    """The same GPUs generate and train, one after the other."""
    interrupt: bool = True
    """New weights at every step: loaded, and all prefixes prefilled again."""
    reward: Callable[[int, int], float | None] = lambda ordinal, sibling: float(sibling % 2)
    filter_zero_advantage: bool = False
    """A group whose rewards are all equal is replaced by another."""
    bound: int | None = None
    """Units that would be trained more than so many versions after their start are dropped."""
    parts: int = 1
    """In which a batch is taken and trained, on GPUs of their own: each as soon as it is there.
    The next version, and what a step costs whatever it trains, come with the last."""


def settings_of(
    paradigm: str, *, batches: float, per_step: int, group_size: int, bound: int
) -> dict[str, Any]:
    """Settings of a `PoolPlan` that follow from the name of its paradigm."""
    by_sample = paradigm == "roll-flash"
    return {
        "in_flight": round(batches * per_step) * (group_size if by_sample else 1),
        "unit": "sample" if by_sample else "group",
        "interrupt": paradigm != "drop",
        "bound": bound if paradigm in ("roll-flash", "drop") else None,
    }


@dataclass(slots=True, eq=False)
class _Unit:
    number: int
    version: int
    open: int
    """Requests that have not ended."""
    lengths: tuple[int, ...]
    requests: set[str] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class PoolRun(ClusterRun):
    """What a pool did, beside what any modelled run says."""

    dropped: int = 0
    """Units that were never trained."""
    dropped_tokens: int = 0
    """Of the dropped units' full lengths."""
    trained_tokens: int = 0
    trained_units: int = 0


class Pool:
    """See the head of this file. Example: ``Pool(plan).run().spans[-1].committed_s``."""

    def __init__(self, plan: PoolPlan) -> None:
        self.plan = plan
        self.batches = [Sharing(plan.rates) for _ in plan.workers]
        self.take = plan.per_step * (plan.group_size if plan.unit == "sample" else 1)
        self.now_s = 0.0
        self.version = 0
        self.run_ = PoolRun(slots=sum(one.slots for one in plan.workers), workers=len(plan.workers))
        self._number = 0
        self._open: dict[int, _Unit] = {}
        self._finished: list[tuple[int, int]] = []
        self._queue: deque[tuple[str, int]] = deque()
        self._at: dict[str, tuple[int, int]] = {}
        """Running request: its worker, its unit."""
        self._training_s = NEVER_S
        self._taken: list[_Unit] = []
        """Of the step that is trained, or whose first parts were."""
        self._ahead_s = 0.0

    def run(self) -> PoolRun:
        """Until the last step is committed."""
        self._admit()
        for _ in range(EVENTS_MAX):
            self._take_part()
            if self.version >= self.plan.steps:
                return self._closed()
            due_s = min(self._generated_s(), self._training_s)
            if due_s == NEVER_S:
                raise ResourceError("the modelled pool stands still: nothing is due any more")
            self._advance(due_s)
        raise ResourceError(f"{EVENTS_MAX} events and no end: the modelled pool goes in a circle")

    def _generated_s(self) -> float:
        if self.plan.shared and self._training_s < NEVER_S:
            return NEVER_S
        return min(batch.next_s() for batch in self.batches)

    def _advance(self, now_s: float) -> None:
        paused = self.plan.shared and self._training_s < NEVER_S
        self.now_s = now_s
        for batch in self.batches:
            if paused:
                batch.skip(now_s)
                continue
            for name in batch.advance(now_s):
                self._ended(name)
        if self._training_s <= now_s + 1e-9:
            self._training_s = NEVER_S
            if len(self._taken) == self.take:
                self._commit()
        self._admit()

    def _ended(self, name: str) -> None:
        _, number = self._at.pop(name)
        unit = self._open[number]
        unit.requests.discard(name)
        unit.open -= 1
        self.run_.requests += 1
        if unit.open:
            return
        if self._is_filtered(unit):
            del self._open[number]
        else:
            heapq.heappush(self._finished, (unit.version, number))

    def _is_filtered(self, unit: _Unit) -> bool:
        plan = self.plan
        if not plan.filter_zero_advantage or plan.unit == "sample":
            return False
        rewards = {plan.reward(unit.number, one) for one in range(len(unit.lengths))}
        return len(rewards - {None}) <= 1

    def _admit(self) -> None:
        plan = self.plan
        if plan.shared and self._training_s < NEVER_S:
            return
        while len(self._open) + len(self._taken) < plan.in_flight:
            self._start()
        while self._queue:
            index = min(range(len(self.batches)), key=lambda one: len(self.batches[one]))
            if len(self.batches[index]) >= plan.workers[index].slots:
                return
            name, length = self._queue.popleft()
            number = int(name.partition("/")[0])
            if number in self._open:
                self._at[name] = index, number
                self.batches[index].add(name, float(length))

    def _start(self) -> None:
        plan, number = self.plan, self._number
        self._number += 1
        if plan.unit == "group":
            lengths = tuple(plan.lengths(number))
        else:
            ordinal, sibling = divmod(number, plan.group_size)
            lengths = (plan.lengths(ordinal)[sibling],)
        unit = _Unit(number, self.version, len(lengths), lengths)
        for sibling, length in enumerate(lengths):
            name = f"{number}/{sibling}"
            unit.requests.add(name)
            self._queue.append((name, length))
        self._open[number] = unit

    def _take_part(self) -> None:
        left = self.take - len(self._taken)
        part = self.take // self.plan.parts
        size = part if left >= 2 * part else left
        if self._training_s < NEVER_S or len(self._finished) < size:
            return
        numbers = [heapq.heappop(self._finished)[1] for _ in range(size)]
        units = [self._open.pop(number) for number in numbers]
        self._taken += units
        samples = sum(len(unit.lengths) for unit in units)
        step_s = self.plan.trainer.step_s(tokens=_tokens(units), samples=samples)
        if size == left:
            self._training_s = self.now_s + step_s
            self._note_step()
        else:
            step_s -= self.plan.trainer.fixed_s
            self._training_s = self.now_s + step_s
            self._ahead_s += step_s
        self._admit()

    def _note_step(self) -> None:
        tokens = _tokens(self._taken)
        self.run_.trained_tokens += tokens
        self.run_.trained_units += len(self._taken)
        staleness = Counter(self.version - unit.version for unit in self._taken)
        self.run_.spans.append(
            StepSpan(
                step=self.version,
                taken_s=self.now_s,
                committed_s=self._training_s,
                tokens=tokens,
                staleness=tuple(sorted(staleness.items())),
                ahead_s=self._ahead_s,
            )
        )

    def _commit(self) -> None:
        self.version += 1
        self._taken, self._ahead_s = [], 0.0
        self._drop_stale()
        if not self.plan.interrupt:
            return
        for batch in self.batches:
            prefix = batch.tokens()
            batch.stall(self.plan.rates.load_s + self.plan.rates.prefill_s(round(prefix)))

    def _drop_stale(self) -> None:
        if self.plan.bound is None:
            return
        oldest = self.version - self.plan.bound
        for number, unit in list(self._open.items()):
            if unit.version >= oldest:
                continue
            del self._open[number]
            self.run_.dropped += 1
            self.run_.dropped_tokens += sum(unit.lengths)
            for name in unit.requests:
                if name in self._at:
                    self.batches[self._at.pop(name)[0]].remove(name)
        self._finished = [one for one in self._finished if one[1] in self._open]
        heapq.heapify(self._finished)

    def _closed(self) -> PoolRun:
        self.run_.wall_s = self.now_s
        for batch in self.batches:
            self.run_.slot_s += batch.slot_s
            self.run_.busy_s += batch.busy_s
        return self.run_


def _tokens(units: Sequence[_Unit]) -> int:
    return sum(sum(unit.lengths) for unit in units)
