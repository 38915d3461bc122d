"""Decides which group may be admitted and which batch may be taken, so that no bound ever breaks.

Rules (docs/staleness.md proves them; every detail has a counterexample there and a named test):

1. *Feasible*: from step s on, for every j >= -1, at most (j + 1) * B groups are due at s + j or
   before. j = -1 says that nothing may be overdue already.
2. *Admit* a group stamped with the newest version t iff the groups in flight stay below C * B, a
   batch in training counting as B, and U with it is feasible from s = t + 1 while a step is
   training, else from s = t. The batch in training has no deadlines any more.
3. *Take* for step s the B finished groups with the earliest deadlines, iff what stays behind is
   feasible from s + 1.
4. *Take a part* of step s: the finished groups with the earliest deadlines, fewer than the batch
   still lacks, iff U is feasible from s with them due at s, as they are from then on. The batch of
   s is those of its parts, and rule 3 for what it lacks. While a step is training, s = t + 1 has
   one part at most; it is given up if that step is refused.

U, the groups dispatched and not yet taken, is given as the number of groups per deadline: there
are few deadlines, however many groups there are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dora_pipe.schemas.batch import deadline_of

_ROUNDING: Final = 1e-9
"""C * B is a product of floats: 1.1 * 10 groups are 11, not 12."""


class Finished(NamedTuple):
    """A complete group that waits for its batch; sorts as batches are taken."""

    deadline: int
    ordinal: int
    group: str


EVALUATION_DEADLINE: Final = -1
"""Evaluation groups are outside U and have no deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a run stands, as far as the bound is concerned.

    Example: ``Standing(version=7, training=True, max_staleness=2, in_flight_batches=2.0,
    per_step=32, steps=70)``: version 7 is the newest and its step is training.
    """

    version: int
    """t: the newest version."""
    training: bool
    """Whether step t is training."""
    max_staleness: int
    """eta."""
    in_flight_batches: float
    """C."""
    per_step: int
    """B."""
    steps: int
    """The run ends when so many steps are committed."""

    @property
    def step(self) -> int:
        """s: the next step to be taken."""
        return self.version + 1 if self.training else self.version

    @property
    def deadline(self) -> int:
        """Of a group that is admitted now."""
        return deadline_of(self.version, self.max_staleness)


def in_flight_max(in_flight_batches: float, per_step: int) -> int:
    """C * B in whole groups; at least one batch, since with fewer no step could ever be taken."""
    return max(per_step, math.ceil(in_flight_batches * per_step - _ROUNDING))


def feasible(deadlines: Mapping[int, int], step: int, per_step: int) -> bool:
    """Whether for every j >= -1 at most (j + 1) * B groups are due at step + j or before.

    Example: ``feasible({4: 2, 5: 3}, 4, 2)`` is False: five groups are due at step 5 or before, and
    two steps take four.
    """
    return _excess(deadlines, step, per_step) is None


def admissible(deadlines: Mapping[int, int], at: Standing) -> int:
    """How many groups may be admitted now, one after the other, before `may_admit` says no.

    Planner and admission both ask this function: a planner with its own idea of it locks up.
    """
    return max(0, _room(deadlines, at)[0])


def closed_by(deadlines: Mapping[int, int], at: Standing) -> str:
    """Name the setting that lets no group be admitted now, with its value; empty if one may be."""
    room, limit = _room(deadlines, at)
    return limit if room <= 0 else ""


def _room(deadlines: Mapping[int, int], at: Standing) -> tuple[int, str]:
    """Groups that may be admitted, and the setting that lets no more in."""
    untaken = sum(deadlines.values())
    in_training = at.per_step if at.training else 0
    most = in_flight_max(at.in_flight_batches, at.per_step)
    room = most - untaken - in_training
    limit = f"staleness.in_flight_batches = {at.in_flight_batches:g} lets {most} groups be open"
    if (left := (at.steps - at.step) * at.per_step - untaken) < room:
        room, limit = left, f"run.steps = {at.steps} leaves no step for more groups"
    due = 0
    for deadline in sorted({*deadlines, at.deadline}):
        due += deadlines.get(deadline, 0)
        if (
            deadline >= at.deadline
            and (left := (deadline - at.step + 1) * at.per_step - due) < room
        ):
            eta = at.max_staleness
            room, limit = (
                left,
                f"staleness.max_staleness = {eta}: {due} groups are due by step {deadline}",
            )
    return room, limit


def may_admit(deadlines: Mapping[int, int], at: Standing) -> bool:
    """Whether one more group, stamped with the newest version, keeps every promise."""
    return admissible(deadlines, at) > 0


def next_batch(
    finished: Sequence[Finished],
    deadlines: Mapping[int, int],
    *,
    step: int,
    per_step: int,
    taken: int = 0,
) -> Sequence[Finished]:
    """What completes the batch of `step`, or nothing while the trainer has to wait.

    `finished` is sorted; `taken` groups are in parts, due at `step`. Taking as soon as it is
    allowed is best: waiting never helps.
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
    """The next part of `step`, of `size` groups, or nothing while there is none.

    A part leaves something for the batch: what makes that whole is taken by `next_batch`.
    """
    if len(finished) < size or taken + size >= per_step:
        return ()
    part = finished[:size]
    return part if feasible(_with_part(deadlines, part, step), step, per_step) else ()


@dataclass(frozen=True, slots=True)
class Lacking:
    """What a batch, or a part of it, waits for: so many unfinished groups."""

    count: int
    until: int | None = None
    """Of those due at this deadline or before; None: of any."""


def lacking(
    finished: Sequence[Finished],
    deadlines: Mapping[int, int],
    *,
    step: int,
    per_step: int,
    taken: int = 0,
    size: int = 0,
) -> Lacking:
    """What the trainer waits for: the next part, where that has `size` groups, else the batch.

    Only to be asked while `next_part` or `next_batch` gives nothing.
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
    """The first deadline by which more groups are due than steps can take, and how many more."""
    due = 0
    for deadline in sorted(deadlines):
        due += deadlines[deadline]
        over = due - max(0, deadline - step + 1) * per_step
        if over > 0:
            return deadline, over
    return None


def surplus(deadlines: Mapping[int, int], at: Standing) -> int:
    """How many groups of U no step is left for; they end as `cancelled(stop)`, latest first."""
    return max(0, sum(deadlines.values()) - max(0, at.steps - at.step) * at.per_step)


def _with_part(due: Mapping[int, int], part: Sequence[Finished], step: int) -> dict[int, int]:
    """U where the groups of a part are due at its step."""
    rest = _without(due, part)
    return rest | {step: rest.get(step, 0) + len(part)}


def _without(
    deadlines: Mapping[int, int], batch: Sequence[Finished], *, step: int = 0, taken: int = 0
) -> dict[int, int]:
    rest = dict(deadlines)
    for one in batch:
        rest[one.deadline] -= 1
    if taken:
        rest[step] -= taken
    return rest
