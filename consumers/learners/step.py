"""A batch on its way through a step, without torch: minibatches for updates, micro-batches for
passes.

Nothing but the batch and the step's settings decides how it is cut, so the same batch is cut the
same way on every machine, and its bits can be made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from dora_pipe.consumers.learners.layout import RowSize, lines_of, pack
from dora_pipe.consumers.learners.port import TrainBatch, TrainGroup
from dora_pipe.consumers.learners.settings import MASKED, Packing, StepSettings
from dora_pipe.consumers.objectives.advantage import batch_advantages, summed_weights, token_weights
from dora_pipe.consumers.objectives.registry import needs_whole
from dora_pipe.consumers.objectives.terms import RowFigures, joined_figures
from dora_pipe.schemas.batch import staleness_of
from dora_pipe.schemas.contexts import TrainedRow, choices_of, counted_tokens, lengths, row_of
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.routes import Choices
from dora_pipe.schemas.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")


def minibatches(groups: Sequence[T], count: int) -> list[list[T]]:
    """Deal groups (in dispatch order) to `count` updates like cards; whole groups, never empty.

    Dealing mixes versions and ages. Fewer groups than updates give fewer updates.

    Example: ``minibatches("abcde", 2) == [["a", "c", "e"], ["b", "d"]]``
    """
    return [list(groups[start::count]) for start in range(min(count, len(groups)))]


@dataclass(slots=True, kw_only=True)
class Item:
    """A trajectory on its way through a step."""

    trajectory: Trajectory
    group: str
    ordinal: int
    sibling: int
    staleness: int
    advantage: float | None
    counted: int
    """Tokens that enter the loss."""
    contexts: Sequence[int]
    """Of those tokens, how many each context has."""
    teacher: Sequence[float] | None
    """Log-probs of those tokens under the teacher, where the step has one."""
    token_staleness: int
    """Staleness of every sampled token by the version that sampled it, added up."""
    weight: float = 1.0
    """Factor of its loss."""
    minibatch: int = 0
    micro_batch: int | None = None
    """The first of its update that it is in."""
    figures: RowFigures | None = None
    figured: int = 0
    """How many of its tokens the figures are of."""

    def note(self, figures: RowFigures, tokens: int, micro_batch: int) -> None:
        """Take up what a pass says of some of its tokens."""
        if self.figures is None or self.micro_batch is None:
            self.figures, self.micro_batch = figures, micro_batch
        else:
            pair = (self.figures, self.figured), (figures, tokens)
            self.figures = joined_figures(pair)
            self.micro_batch = min(self.micro_batch, micro_batch)
        self.figured += tokens

    @property
    def worth(self) -> bool:
        """Whether it has an advantage that is not zero."""
        return bool(self.advantage)

    def divide_loss(self, divisor: int) -> None:
        """What the mean divides by was not known when the figures were noted."""
        if self.figures is not None:
            self.figures = replace(self.figures, loss_share=self.figures.loss_share / divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextRow:
    """A context of a trajectory, whose own sampled tokens count."""

    context: int
    tokens: int
    """Of the context's whole sequence."""
    first: int
    """How many tokens of the trajectory count before its own."""
    counted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Rows whose tokens an objective sees as one trajectory.

    They are all of its rows; or one alone, where nothing but itself decides what a token comes to.
    """

    item: Item
    rows: Sequence[ContextRow]
    """Longest first."""
    weight: float
    """Of each token in the mean over the minibatch."""

    @property
    def counted(self) -> int:
        """Tokens that count."""
        return sum(row.counted for row in self.rows)

    @property
    def width(self) -> int:
        """Tokens of its longest row."""
        return self.rows[0].tokens

    @property
    def teacher(self) -> Sequence[float] | None:
        """Log-probs of its counted tokens under the teacher, where the step has one."""
        said = self.item.teacher
        if said is None or self.counted == self.item.counted == self.rows[0].counted:
            return said
        return [one for row in self.rows for one in said[row.first : row.first + row.counted]]

    @property
    def advantage(self) -> float:
        """That of each of its tokens."""
        return self.item.advantage or 0.0

    def sequences(self) -> list[TrainedRow]:
        """Its rows as they are trained."""
        return [row_of(self.item.trajectory, row.context) for row in self.rows]

    def choices(self) -> list[Choices | None]:
        """Through which experts the tokens of each went, where the record says so."""
        return [choices_of(self.item.trajectory, row.context) for row in self.rows]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that are computed at once."""

    rows: int
    width: int
    """Tokens of the longest one: every line is padded to it."""
    lines: int = 0
    """Into which the rows are packed (`layout.lines_of`); 0: each has its own."""
    masked: bool = False
    """These go by a mask also where each sequence could be computed by itself."""

    @property
    def padded_tokens(self) -> int:
        """What is computed."""
        return (self.lines or self.rows) * self.width

    @property
    def packing(self) -> Packing:
        """By which its rows were laid out."""
        return MASKED if self.masked else self.lines > 0


@dataclass(slots=True, kw_only=True)
class Pass:
    """One forward and backward pass of an update."""

    units: Sequence[Unit]
    """Longest first."""
    parts: Sequence[Part]
    """One, in which all rows of the units are, in their order; several for a single unit whose rows
    are too many to be computed at once."""
    number: int
    """Among the passes of its update."""
    proximal: Tensor | None = None
    """Log-probs of the counted tokens under the step's first weights, where they are needed."""

    @property
    def padded_tokens(self) -> int:
        """What the pass computes."""
        return sum(part.padded_tokens for part in self.parts)

    def note(self, figures: Sequence[RowFigures]) -> None:
        """Take up what each of its units came to."""
        for unit, one in zip(self.units, figures, strict=True):
            unit.item.note(one, unit.counted, self.number)


def items_of(batch: TrainBatch, settings: StepSettings) -> list[list[Item]]:
    """The trajectories of every group of a batch, with their advantages."""
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
    batch: TrainBatch,
    group: TrainGroup,
    trajectory: Trajectory,
    advantage: float | None,
) -> Item:
    _, ordinal, sibling = parse_trajectory_id(trajectory.trajectory)
    contexts = counted_tokens(trajectory)
    return Item(
        trajectory=trajectory,
        group=group.group,
        ordinal=ordinal,
        sibling=sibling,
        staleness=batch.step - group.version,
        advantage=advantage,
        counted=sum(contexts),
        contexts=contexts,
        teacher=None if batch.teacher is None else batch.teacher[trajectory.trajectory],
        token_staleness=sum(
            staleness_of(batch.step, one.version) * (one.end - one.start)
            for one in trajectory.segments
            if one.kind == "model"
        ),
        weight=(batch.weights or {}).get(trajectory.trajectory, 1.0),
    )


def passes_of(items: Sequence[Item], minibatch: int, settings: StepSettings) -> list[Pass]:
    """The passes of one optimizer update; none if nothing in it has a gradient."""
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
    """The passes of a part of an update, numbered from `first`, and what they are to be divided by
    once all parts are there (`summed_weights`)."""
    objective = settings.objective
    assert objective.loss is not None
    valid = [item for item in items if item.advantage is not None]
    sampled = [item.counted for item in valid]
    weights, divisor = summed_weights(sampled, objective.loss, tokens=objective.loss_tokens)
    passes = _passes(valid, weights, settings)
    return [replace(one, number=first + one.number) for one in passes], divisor


def _passes(valid: Sequence[Item], weights: Sequence[float], settings: StepSettings) -> list[Pass]:
    """Items of an update, with the weight of their tokens, in passes.

    A zero advantage without a KL term, a teacher and a loss of routers has a gradient of exactly
    zero, as has a weight of zero: it still counts in the mean, but nothing is computed for it.
    """
    objective = settings.objective
    chosen = [
        (item, weight * item.weight)
        for item, weight in zip(valid, weights, strict=True)
        if item.counted
        and item.weight
        and (item.worth or objective.kl or objective.teacher_weight or settings.router_aux_loss)
    ]
    whole = any(item.trajectory.meta.contexts for item, _ in chosen) and needs_whole(objective)
    units = [unit for item, weight in chosen for unit in _units(item, weight, whole=whole)]
    limit, packing = settings.micro_batch_tokens, settings.packing
    alone = [one_pass([unit], packing=packing) for unit in units]
    fits = [one.padded_tokens <= limit or len(one.units[0].rows) == 1 for one in alone]
    together = [unit for unit, fit in zip(units, fits, strict=True) if fit]
    found = [
        one_pass([together[at] for at in rows], packing=packing)
        for rows in _packed(together, settings)
    ]
    found += [_in_parts(unit, settings) for unit, fit in zip(units, fits, strict=True) if not fit]
    return [replace(one, number=number) for number, one in enumerate(found)]


def _units(item: Item, weight: float, *, whole: bool) -> list[Unit]:
    """What of a trajectory an objective must see together."""
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
        for of_unit in ([rows] if whole else [[row] for row in rows])
    ]


def _packed(units: Sequence[Unit], settings: StepSettings) -> list[tuple[int, ...]]:
    sizes = [
        RowSize(
            ordinal=unit.item.ordinal,
            sibling=unit.item.sibling,
            tokens=unit.width,
            others=[row.tokens for row in unit.rows[1:]],
        )
        for unit in units
    ]
    limit, packing = settings.micro_batch_tokens, bool(settings.packing)
    return [micro.rows for micro in pack(sizes, padded_tokens_max=limit, packing=packing)]


def one_pass(units: Sequence[Unit], *, packing: Packing) -> Pass:
    """A pass of these, longest first, all computed at once; its number is 0."""
    lengths = [row.tokens for unit in units for row in unit.rows]
    return Pass(units=units, parts=[_part(lengths, packing=packing)], number=0)


def _part(lengths: Sequence[int], *, packing: Packing) -> Part:
    width = max(lengths)
    lines = len(lines_of(lengths, width)) if packing else 0
    return Part(rows=len(lengths), width=width, lines=lines, masked=packing == MASKED)


def _in_parts(unit: Unit, settings: StepSettings) -> Pass:
    """A pass of one unit whose rows are computed one part after the other."""
    limit, packing = settings.micro_batch_tokens, settings.packing
    sizes = [RowSize(ordinal=0, sibling=0, tokens=row.tokens) for row in unit.rows]
    cut = [
        [unit.rows[at] for at in micro.rows]
        for micro in pack(sizes, padded_tokens_max=limit, packing=bool(packing))
    ]
    parts = [_part([row.tokens for row in rows], packing=packing) for rows in cut]
    ordered = replace(unit, rows=[row for rows in cut for row in rows])
    return Pass(units=[ordered], parts=parts, number=0)


def updates_of(batch: TrainBatch, settings: StepSettings) -> tuple[list[Item], list[list[Pass]]]:
    """The trajectories of a batch in its order, and the passes of each update of a step."""
    items = items_of(batch, settings)
    updates = [
        passes_of([item for group in groups for item in group], number, settings)
        for number, groups in enumerate(minibatches(items, settings.minibatches))
    ]
    return [item for group in items for item in group], updates
