"""Commands of rank 0, replies, and the split of passes over ranks.

Ranks read trajectories from the log. They synchronize after every pass (ZeRO 2 and 3 reduce
gradients, ZeRO 3 gathers weights), so a round has passes of similar size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec

from dora_pipe.consumers.learners.learner import LoggedAt, TrainBatch
from dora_pipe.consumers.learners.step import Part, Pass, one_pass
from dora_pipe.consumers.objectives.terms import RowMetrics
from dora_pipe.store.log_location import LogLocation

Plain = float | int | str | bool


class RankCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """Base; `learner` numbers a process's learners, `retired` are unused ones."""

    learner: int
    retired: tuple[int, ...] = ()


class Open(RankCommand, frozen=True, kw_only=True, tag="open"):
    """Create an engine; other machines map rank 0's paths to their store."""

    assets: str
    log: LogLocation | None
    options: dict[str, Any]
    """`EngineOptions` without the device."""
    threads: int
    modules: str


class LoadBase(RankCommand, frozen=True, kw_only=True, tag="load-base"):
    """Load the adapter's base from rank 0."""


class Load(RankCommand, frozen=True, kw_only=True, tag="load"):
    """Load trained tensors, and with `moments` AdamW's, from rank 0."""

    moments: bool
    updates: int


class Read(RankCommand, frozen=True, kw_only=True, tag="read"):
    """Help to read trained tensors or moments, by name."""

    moments: bool


class UnitCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A unit that an objective sees as one trajectory (`step.Unit`)."""

    at: LoggedAt
    contexts: list[int]
    length: int
    advantage: float
    weight: float
    teacher: list[float] | None = None
    """Only rank 0 calls the teacher."""


class PassCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A forward and backward pass; `parts` cut its rows in order."""

    units: list[UnitCommand]
    parts: list[Part]


class ShareCommand(RankCommand, frozen=True, kw_only=True):
    """Base of commands with work: report the share as read, then compute if all ranks could."""

    settings: dict[str, Plain]
    reference: str
    """Path on rank 0."""
    updates: list[list[list[PassCommand]]]
    """Passes by update and rank; ranks with fewer run idle ones."""


class Train(ShareCommand, frozen=True, kw_only=True, tag="train"):
    """Train a step, or a part's update; `later` takes proximal log-probs from kept weights."""

    later: bool = False


class Gather(ShareCommand, frozen=True, kw_only=True, tag="gather"):
    """Add the gradient of a part."""

    fresh: bool


class Finish(RankCommand, frozen=True, kw_only=True, tag="finish"):
    """Divide the gathered gradient and update."""

    divisor: int
    learning_rate: float
    max_grad_norm: float


class Keep(RankCommand, frozen=True, kw_only=True, tag="keep"):
    """Copy the trained state, restore it, or free the copy."""

    what: Literal["take", "go-back", "let-go"]


class LeaveDevice(RankCommand, frozen=True, kw_only=True, tag="leave-device"):
    """Free the device until the next command."""


class EndRanks(RankCommand, frozen=True, kw_only=True, tag="end"):
    """End the ranks."""


AnyCommand = Open | LoadBase | Load | Read | Train | Gather | Finish | Keep | LeaveDevice | EndRanks


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """Result of reading a share; `why` is its error."""

    why: str = ""
    broken: bool = False
    """True if logged bytes changed, False if unreadable."""
    records: int = 0


class UpdateReply(msgspec.Struct, kw_only=True):
    """Result of one update on one rank; sums are the rank's."""

    loss: float = 0.0
    router_aux: float = 0.0
    norm: float = 0.0
    """Global gradient norm; 0 if only gathered."""
    padded_tokens: int = 0
    rows: list[list[RowMetrics]] = []


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """Updates of a step; the last may have a norm that is not finite."""

    updates: list[UpdateReply]


COMMANDS: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)
_NOWHERE: Final = LoggedAt(partition=0, offset=0, sha256="")


def shares(passes: Sequence[Pass], *, ranks: int) -> list[list[Pass]]:
    """Return the passes of each rank, renumbered; counts differ by at most one.

    Halves large passes until every rank has one.
    """
    cut = _halved(list(passes), ranks)
    cut.sort(key=lambda pass_: (-pass_.padded_tokens, pass_.number))
    numbered = [replace(pass_, number=number) for number, pass_ in enumerate(cut)]
    by_rank: list[list[Pass]] = [[] for _ in range(ranks)]
    for start in range(0, len(numbered), ranks):
        round_ = numbered[start : start + ranks]
        # Alternate direction, so that no rank has every round's largest pass.
        order = range(ranks) if start // ranks % 2 == 0 else range(ranks - 1, -1, -1)
        for rank, pass_ in zip(order, round_, strict=False):
            by_rank[rank].append(pass_)
    return by_rank


def _halved(passes: list[Pass], count: int) -> list[Pass]:
    while len(passes) < count:
        sized = [
            (pass_.padded_tokens, -index)
            for index, pass_ in enumerate(passes)
            if len(pass_.units) > 1
        ]
        if not sized:
            break
        index = -max(sized)[1]
        passes[index : index + 1] = _halves(passes[index])
    for number, pass_ in enumerate(passes):
        passes[number] = replace(pass_, number=number)
    return passes


def _halves(pass_: Pass) -> tuple[Pass, Pass]:
    middle, packing = (len(pass_.units) + 1) // 2, pass_.parts[0].packing
    halves = pass_.units[:middle], pass_.units[middle:]
    return one_pass(halves[0], packing=packing), one_pass(halves[1], packing=packing)


def places_of(batch: TrainBatch) -> dict[str, LoggedAt]:
    positions: dict[str, LoggedAt] = {}
    for group in batch.groups:
        assert len(group.places) == len(group.trajectories), "several ranks need a log"
        named = [trajectory.trajectory for trajectory in group.trajectories]
        positions |= zip(named, group.places, strict=True)
    return positions


def share_commands(
    by_rank: Sequence[Sequence[Pass]], places: dict[str, LoggedAt]
) -> list[list[PassCommand]]:
    """Return the pass commands of each rank; one rank needs no `places`."""
    return [[pass_command(pass_, places) for pass_ in own] for own in by_rank]


def pass_command(pass_: Pass, places: dict[str, LoggedAt]) -> PassCommand:
    units = [
        UnitCommand(
            at=places.get(unit.item.trajectory.trajectory, _NOWHERE),
            contexts=[row.context for row in unit.rows],
            length=unit.counted,
            advantage=unit.advantage,
            weight=unit.weight,
            teacher=None if unit.teacher is None else list(unit.teacher),
        )
        for unit in pass_.units
    ]
    return PassCommand(units=units, parts=list(pass_.parts))
