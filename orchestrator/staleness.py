"""Admission and batch rules that keep the staleness bound (proofs: docs/staleness.md).

1. *Feasible* from step s: for every j >= -1, at most (j + 1) * B groups have a deadline <= s + j.
   j = -1 excludes overdue groups.
2. *Admit* a group of the newest version t iff the groups in flight are below C * B, counting a
   batch in training as B, and U including the group is feasible from s = t + 1 during training,
   else from s = t. Groups in training no longer have deadlines.
3. *Take* for step s the B finished groups with the earliest deadlines, iff the rest of U is
   feasible from s + 1.
4. *Take a part* of step s: finished groups with the earliest deadlines, fewer than the batch still
   lacks, iff U is feasible from s with their deadlines set to s from then on. Rule 3 takes the
   missing groups of the batch. During training, s = t + 1 has at most one part; it is given up if
   step t is refused.

U, the groups dispatched and not taken, is represented as group counts per deadline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dora_pipe.schemas.batch import deadline_of

_ROUNDING: Final = 1e-9
"""Tolerance for the float product C * B: 1.1 * 10 is 11 groups, not 12."""


class Finished(NamedTuple):
    """Complete group waiting for its batch; sorts in the order of taking."""

    deadline: int
    ordinal: int
    group: str


EVALUATION_DEADLINE: Final = -1
"""Evaluation groups are outside U and have no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Run position and settings that the rules use.

    Example: ``Standing(version=7, training=True, max_staleness=2, async_batches=2.0,
    per_step=32, steps=70)``: version 7 is the newest and its step is training.
    """

    version: int
    """t: newest version."""
    training: bool
    """Whether step t is training."""
    max_staleness: int
    """eta."""
    async_batches: float
    """C."""
    per_step: int
    """B."""
    steps: int
    """Committed steps after which the run ends."""

    @property
    def step(self) -> int:
        """s: next step to take."""
        return self.version + 1 if self.training else self.version

    @property
    def deadline(self) -> int:
        """Deadline of a group admitted now."""
        return deadline_of(self.version, self.max_staleness)


def in_flight_max(async_batches: float, per_step: int) -> int:
    """Return C * B in whole groups; at least one batch, or no step could be taken."""
    return max(per_step, math.ceil(async_batches * per_step - _ROUNDING))


def feasible(deadlines: Mapping[int, int], step: int, per_step: int) -> bool:
    """Report whether at most (j + 1) * B groups are due by step + j, for every j >= -1.

    Example: ``feasible({4: 2, 5: 3}, 4, 2)`` is False: five groups are due by step 5, and two steps
    take four.
    """
    return _excess(deadlines, step, per_step) is None


def admissible(deadlines: Mapping[int, int], standing: Standing) -> int:
    """Return how many groups may be admitted now, one after the other.

    Planner and admission must share this function; different answers deadlock the run.
    """
    return max(0, _room(deadlines, standing)[0])


def closed_by(deadlines: Mapping[int, int], standing: Standing) -> str:
    """Return the setting that blocks admission, with its value; empty if a group may be
    admitted."""
    room, limit = _room(deadlines, standing)
    return limit if room <= 0 else ""


def _room(deadlines: Mapping[int, int], standing: Standing) -> tuple[int, str]:
    untaken = sum(deadlines.values())
    in_training = standing.per_step if standing.training else 0
    most = in_flight_max(standing.async_batches, standing.per_step)
    room = most - untaken - in_training
    limit = f"staleness.async_batches = {standing.async_batches:g} lets {most} groups be open"
    if (remaining := (standing.steps - standing.step) * standing.per_step - untaken) < room:
        room, limit = remaining, f"run.steps = {standing.steps} leaves no step for more groups"
    due = 0
    for deadline in sorted({*deadlines, standing.deadline}):
        due += deadlines.get(deadline, 0)
        if (
            deadline >= standing.deadline
            and (remaining := (deadline - standing.step + 1) * standing.per_step - due) < room
        ):
            eta = standing.max_staleness
            room, limit = (
                remaining,
                f"staleness.max_staleness = {eta}: {due} groups are due by step {deadline}",
            )
    return room, limit


def may_admit(deadlines: Mapping[int, int], standing: Standing) -> bool:
    """Report whether one more group keeps the bound."""
    return admissible(deadlines, standing) > 0


def next_batch(
    finished: Sequence[Finished],
    deadlines: Mapping[int, int],
    *,
    step: int,
    per_step: int,
    taken: int = 0,
) -> Sequence[Finished]:
    """Return the groups that complete the batch of `step`; empty if the trainer must wait.

    `finished` is sorted; `taken` groups are in parts, due at `step`. Taking as soon as allowed is
    optimal: waiting never helps.
    """
    lacks = per_step - taken
    if len(finished) < lacks:
        return ()
    batch = finished[:lacks]
    behind = _without(deadlines, batch, step=step, taken=taken)
    return batch if feasible(behind, step + 1, per_step) else ()


def next_part(
    finished: Sequence[Finished],
    deadlines: Mapping[int, int],
    *,
    step: int,
    per_step: int,
    taken: int,
    size: int,
) -> Sequence[Finished]:
    """Return the next part of `step`, `size` groups; empty while it must wait.

    A part never completes the batch; `next_batch` does.
    """
    if len(finished) < size or taken + size >= per_step:
        return ()
    part = finished[:size]
    return part if feasible(_with_part(deadlines, part, step), step, per_step) else ()


@dataclass(frozen=True, slots=True)
class Lacking:
    """Unfinished groups that a batch or part waits for."""

    count: int
    until: int | None = None
    """Latest deadline that counts; None for any."""


def lacking(
    finished: Sequence[Finished],
    deadlines: Mapping[int, int],
    *,
    step: int,
    per_step: int,
    taken: int = 0,
    size: int = 0,
) -> Lacking:
    """Return the groups missing for the next part if `size` is set, else for the batch.

    Valid only while `next_part` or `next_batch` returns nothing.
    """
    needs = size or per_step - taken
    if len(finished) < needs:
        return Lacking(needs - len(finished))
    if size:
        over = _excess(_with_part(deadlines, finished[:size], step), step, per_step)
    else:
        behind = _without(deadlines, finished[:needs], step=step, taken=taken)
        over = _excess(behind, step + 1, per_step)
    return Lacking(0) if over is None else Lacking(over[1], over[0])


def _excess(deadlines: Mapping[int, int], step: int, per_step: int) -> tuple[int, int] | None:
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        over = due - max(0, deadline - step + 1) * per_step
        if over > 0:
            return deadline, over
    return None


def redundant(deadlines: Mapping[int, int], standing: Standing) -> int:
    """Return how many groups of U have no step left; they are cancelled, latest deadline first."""
    return max(
        0, sum(deadlines.values()) - max(0, standing.steps - standing.step) * standing.per_step
    )


def _with_part(due: Mapping[int, int], part: Sequence[Finished], step: int) -> dict[int, int]:
    rest = _without(due, part)
    return rest | {step: rest.get(step, 0) + len(part)}


def _without(
    deadlines: Mapping[int, int], batch: Sequence[Finished], *, step: int = 0, taken: int = 0
) -> dict[int, int]:
    rest = dict(deadlines)
    for group in batch:
        rest[group.deadline] -= 1
    if taken:
        rest[step] -= taken
    return rest
