"""Which rank does which passes of an update, and how rank 0 says so; a function of the batch and
the number of ranks.

Ranks meet after every pass (ZeRO 2 and 3 add gradients up there, ZeRO 3 gathers weights), so the
slowest pass of a round costs all of them its time: passes of about equal size go into one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from dora_pipe.consumers.learners.deepspeed.commands import PassCommand, RowCommand
from dora_pipe.consumers.learners.packing import MicroBatch
from dora_pipe.consumers.learners.port import LoggedAt, TrainBatch
from dora_pipe.consumers.learners.step import Pass

_NOWHERE: Final = LoggedAt(partition=0, offset=0, sha256="")


def shares(passes: Sequence[Pass], *, ranks: int, rounds_min: int = 1) -> list[list[Pass]]:
    """The passes of each rank, in order; their numbers are new.

    Large passes are halved until every rank has at least `rounds_min` of them, as far as there are
    rows. Ranks may differ by one pass; who has fewer stands idle in the last round.

    Example: five passes on two ranks: ``[[0, 3, 4], [1, 2]]`` by falling size.
    """
    cut = _halved(list(passes), ranks * rounds_min)
    cut.sort(key=lambda one: (-one.micro.padded_tokens, one.number))
    numbered = [replace(one, number=number) for number, one in enumerate(cut)]
    found: list[list[Pass]] = [[] for _ in range(ranks)]
    for start in range(0, len(numbered), ranks):
        round_ = numbered[start : start + ranks]
        # Back and forth, so that no rank has the largest pass of every round.
        order = range(ranks) if start // ranks % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, one in zip(order, round_, strict=False):
            found[rank].append(one)
    return found


def _halved(passes: list[Pass], count: int) -> list[Pass]:
    """At least so many passes, by halving the largest again and again, if there are rows."""
    while len(passes) < count:
        sized = [
            (one.micro.padded_tokens, -place)
            for place, one in enumerate(passes)
            if len(one.items) > 1
        ]
        if not sized:
            break
        place = -max(sized)[1]
        passes[place : place + 1] = _halves(passes[place])
    for number, one in enumerate(passes):
        passes[number] = replace(one, number=number)
    return passes


def _halves(one: Pass) -> tuple[Pass, Pass]:
    middle = (len(one.items) + 1) // 2
    return _part(one, 0, middle), _part(one, middle, len(one.items))


def _part(one: Pass, start: int, end: int) -> Pass:
    items = one.items[start:end]
    width = max(len(item.trajectory.token_ids) for item in items)
    micro = MicroBatch(rows=one.micro.rows[start:end], width=width)
    return replace(one, items=items, weights=one.weights[start:end], micro=micro)


def places_of(batch: TrainBatch) -> dict[str, LoggedAt]:
    """Where each trajectory of a batch lies."""
    found: dict[str, LoggedAt] = {}
    for group in batch.groups:
        assert len(group.places) == len(group.trajectories), "several ranks need a log"
        named = [one.trajectory for one in group.trajectories]
        found |= zip(named, group.places, strict=True)
    return found


def pass_command(one: Pass, places: dict[str, LoggedAt]) -> PassCommand:
    """A pass as rank 0 commands it; without places where rank 0 does it itself."""
    rows = [
        RowCommand(
            at=places.get(item.trajectory.trajectory, _NOWHERE),
            advantage=item.advantage or 0.0,
            weight=weight,
        )
        for item, weight in zip(one.items, one.weights, strict=True)
    ]
    return PassCommand(rows=rows, width=one.micro.width)
