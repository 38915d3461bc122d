"""Cuts a batch into minibatches (updates) and micro-batches (passes), reproducibly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dora_pipe.consumers.learners.layout import RowSize, lines_of, pack
from dora_pipe.consumers.learners.learner import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.settings import MASKED, Packing, StepSettings
from dora_pipe.consumers.objectives.advantage import batch_advantages, summed_weights, token_weights
from dora_pipe.consumers.objectives.registry import needs_whole
from dora_pipe.consumers.objectives.terms import RowMetrics, joined_metrics
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.context_tokens import TrainedRow, choices_of, counted_tokens, row_of
from dora_pipe.schemas.contexts import lengths
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.routes import Choices
from dora_pipe.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def minibatches(groups: Sequence[T], count: int) -> list[list[T]]:
    """Deal whole groups round-robin to at most `count` updates, mixing versions and ages.

    Example: ``minibatches("abcde", 2) == [["a", "c", "e"], ["b", "d"]]``
    """
    return [list(groups[start::count]) for start in range(min(count, len(groups)))]


@dataclass(slots=True, kw_only=True)
class Item:
    """A trajectory in a step."""

    trajectory: Trajectory
    group: str
    ordinal: int
    sample: int
    staleness: int
    advantage: float | None
    counted: int
    """Tokens in the loss; `contexts` splits them."""
    contexts: Sequence[int]
    teacher: Sequence[float] | None
    token_staleness: int
    """Summed staleness of sampled tokens, each by its own version."""
    minibatch: int = 0
    micro_batch: int | None = None
    """First one with some of its tokens."""
    metrics: RowMetrics | None = None
    noted_tokens: int = 0

    def note(self, metrics: RowMetrics, tokens: int, micro_batch: int) -> None:
        """Merge the metrics of a pass over some of its tokens."""
        if self.metrics is None or self.micro_batch is None:
            self.metrics, self.micro_batch = metrics, micro_batch
        else:
            pair = (self.metrics, self.noted_tokens), (metrics, tokens)
            self.metrics = joined_metrics(pair)
            self.micro_batch = min(self.micro_batch, micro_batch)
        self.noted_tokens += tokens

    @property
    def worth(self) -> bool:
        """Return whether its advantage is valid and not zero."""
        return bool(self.advantage)

    def divide_loss(self, divisor: int) -> None:
        """Divide the loss share by the mean's divisor, unknown before."""
        if self.metrics is not None:
            self.metrics = replace(self.metrics, loss_share=self.metrics.loss_share / divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """A context whose own sampled tokens count."""

    context: int
    tokens: int
    first: int
    """Counted tokens of the trajectory in earlier contexts."""
    counted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows that an objective sees as one trajectory: all of it, or one independent row."""

    item: Item
    rows: Sequence[ContextRow]
    weight: float
    """Weight of each token in the minibatch mean."""

    @property
    def counted(self) -> int:
        return sum(row.counted for row in self.rows)

    @property
    def width(self) -> int:
        return self.rows[0].tokens

    @property
    def teacher(self) -> Sequence[float] | None:
        logprobs = self.item.teacher
        if logprobs is None or self.counted == self.item.counted == self.rows[0].counted:
            return logprobs
        return [
            logprob
            for row in self.rows
            for logprob in logprobs[row.first : row.first + row.counted]
        ]

    @property
    def advantage(self) -> float:
        return self.item.advantage or 0.0

    def sequences(self) -> list[TrainedRow]:
        return [row_of(self.item.trajectory, row.context) for row in self.rows]

    def choices(self) -> list[Choices | None]:
        """Return the recorded experts by row, if any."""
        return [choices_of(self.item.trajectory, row.context) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows computed together."""

    rows: int
    width: int
    lines: int = 0
    masked: bool = False

    @property
    def padded_tokens(self) -> int:
        """Return the computed tokens."""
        return (self.lines or self.rows) * self.width

    @property
    def packing(self) -> Packing:
        return MASKED if self.masked else self.lines > 0


@dataclass(slots=True, kw_only=True)
class Pass:
    """A forward and backward pass of an update."""

    units: Sequence[Unit]
    parts: Sequence[Part]
    """Several if a single unit is too large to compute at once."""
    number: int
    proximal: Tensor | None = None
    """Log-probs under the step's first weights."""

    @property
    def padded_tokens(self) -> int:
        return sum(part.padded_tokens for part in self.parts)

    def note(self, metrics: Sequence[RowMetrics]) -> None:
        for unit, row in zip(self.units, metrics, strict=True):
            unit.item.note(row, unit.counted, self.number)


def items_of(batch: TrainBatch, settings: StepSettings) -> list[list[Item]]:
    """Return the trajectories of each group, with advantages."""
    rewards = [
        (group.version, [trajectory.reward for trajectory in group.trajectories])
        for group in batch.groups
    ]
    objective = settings.objective
    advantages = batch_advantages(rewards, objective.advantage, bool(objective.advantage_std))
    return [
        [
            _item(batch, group, trajectory, advantage)
            for trajectory, advantage in zip(group.trajectories, of_group, strict=True)
        ]
        for group, of_group in zip(batch.groups, advantages, strict=True)
    ]


def _item(
    batch: TrainBatch, group: TrainGroup, trajectory: Trajectory, advantage: float | None
) -> Item:
    _, ordinal, sample = parse_trajectory_id(trajectory.trajectory)
    contexts = counted_tokens(trajectory)
    return Item(
        trajectory=trajectory,
        group=group.group,
        ordinal=ordinal,
        sample=sample,
        staleness=batch.step - group.version,
        advantage=advantage,
        counted=sum(contexts),
        contexts=contexts,
        teacher=None if batch.teacher is None else batch.teacher[trajectory.trajectory],
        token_staleness=sum(
            staleness_of(batch.step, segment.version) * (segment.end - segment.start)
            for segment in trajectory.segments
            if segment.kind == "model"
        ),
    )


def passes_of(items: Sequence[Item], minibatch: int, settings: StepSettings) -> list[Pass]:
    """Return the passes of one update; empty if nothing has a gradient."""
    for item in items:
        item.minibatch = minibatch
    objective = settings.objective
    assert objective.loss is not None
    valid = [item for item in items if item.advantage is not None]
    sampled = [item.counted for item in valid]
    weights = token_weights(sampled, objective.loss, tokens=objective.loss_tokens)
    return _passes(valid, weights, settings)


def part_passes(
    items: Sequence[Item], settings: StepSettings, *, first: int
) -> tuple[list[Pass], int]:
    """Return the passes of a part, numbered from `first`, and its divisor."""
    objective = settings.objective
    assert objective.loss is not None
    valid = [item for item in items if item.advantage is not None]
    sampled = [item.counted for item in valid]
    weights, divisor = summed_weights(sampled, objective.loss, tokens=objective.loss_tokens)
    passes = _passes(valid, weights, settings)
    return [replace(pass_, number=first + pass_.number) for pass_ in passes], divisor


def _passes(valid: Sequence[Item], weights: Sequence[float], settings: StepSettings) -> list[Pass]:
    """Skips exactly zero gradients, which still count in the mean: zero advantage without KL,
    teacher and router loss."""
    objective = settings.objective
    also = objective.kl_coef or objective.teacher_weight or settings.router_aux_loss
    chosen = [
        (item, weight)
        for item, weight in zip(valid, weights, strict=True)
        if item.counted and (item.worth or also)
    ]
    joined = any(item.trajectory.meta.contexts for item, _ in chosen) and needs_whole(objective)
    units = [unit for item, weight in chosen for unit in _units(item, weight, joined=joined)]
    limit, packing = settings.micro_batch_tokens, settings.packing
    alone = [one_pass([unit], packing=packing) for unit in units]
    fits = [pass_.padded_tokens <= limit or len(pass_.units[0].rows) == 1 for pass_ in alone]
    together = [unit for unit, fit in zip(units, fits, strict=True) if fit]
    passes = [
        one_pass([together[index] for index in rows], packing=packing)
        for rows in _packed(together, settings)
    ]
    passes += [_in_parts(unit, settings) for unit, fit in zip(units, fits, strict=True) if not fit]
    return [replace(pass_, number=number) for number, pass_ in enumerate(passes)]


def _units(item: Item, weight: float, *, joined: bool) -> list[Unit]:
    meta = item.trajectory.meta
    sizes = lengths(meta.contexts, item.trajectory.length)
    rows, first = [], 0
    for context, (tokens, counted) in enumerate(zip(sizes, item.contexts, strict=True)):
        if counted:
            rows.append(ContextRow(context=context, tokens=tokens, first=first, counted=counted))
        first += counted
    rows.sort(key=lambda row: -row.tokens)
    return [
        Unit(item=item, rows=of_unit, weight=weight)
        for of_unit in ([rows] if joined else [[row] for row in rows])
    ]


def _packed(units: Sequence[Unit], settings: StepSettings) -> list[tuple[int, ...]]:
    sizes = [
        RowSize(
            ordinal=unit.item.ordinal,
            sample=unit.item.sample,
            tokens=unit.width,
            others=[row.tokens for row in unit.rows[1:]],
        )
        for unit in units
    ]
    limit, packing = settings.micro_batch_tokens, bool(settings.packing)
    return [micro.rows for micro in pack(sizes, padded_tokens_max=limit, packing=packing)]


def one_pass(units: Sequence[Unit], *, packing: Packing) -> Pass:
    """Return one pass, number 0, of units ordered longest first."""
    lengths = [row.tokens for unit in units for row in unit.rows]
    return Pass(units=units, parts=[_part(lengths, packing=packing)], number=0)


def _part(lengths: Sequence[int], *, packing: Packing) -> Part:
    width = max(lengths)
    lines = len(lines_of(lengths, width)) if packing else 0
    return Part(rows=len(lengths), width=width, lines=lines, masked=packing == MASKED)


def _in_parts(unit: Unit, settings: StepSettings) -> Pass:
    limit, packing = settings.micro_batch_tokens, settings.packing
    sizes = [RowSize(ordinal=0, sample=0, tokens=row.tokens) for row in unit.rows]
    cut = [
        [unit.rows[index] for index in micro.rows]
        for micro in pack(sizes, padded_tokens_max=limit, packing=bool(packing))
    ]
    parts = [_part([row.tokens for row in rows], packing=packing) for rows in cut]
    ordered = replace(unit, rows=[row for rows in cut for row in rows])
    return Pass(units=[ordered], parts=parts, number=0)


def updates_of(batch: TrainBatch, settings: StepSettings) -> tuple[list[Item], list[list[Pass]]]:
    """Return the trajectories in batch order, and the passes of each update."""
    items = items_of(batch, settings)
    updates = [
        passes_of([item for group in groups for item in group], number, settings)
        for number, groups in enumerate(minibatches(items, settings.minibatches))
    ]
    return [item for group in items for item in group], updates
