"""Which rank does which passes of an update, and what crosses between the ranks: commands of rank
0, replies of the others.

Decisions only: which records of the log a rank trains on, and how. Trajectories never cross; every
rank reads its own from the log. (Weights do, when they are loaded and published.)

Ranks meet after every pass (ZeRO 2 and 3 add gradients up there, ZeRO 3 gathers weights), so the
slowest pass of a round costs all of them its time: passes of about equal size go into one round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final, Literal

import msgspec

from dora_pipe.consumers.learners.port import LoggedAt, TrainBatch
from dora_pipe.consumers.learners.step import Part, Pass, one_pass
from dora_pipe.consumers.objectives.terms import RowFigures
from dora_pipe.store.log_location import LogLocation

Plain = float | int | str | bool


class RankCommand(msgspec.Struct, frozen=True, kw_only=True, tag_field="command"):
    """Base. `learner` numbers the learners of a process; `retired` are those nobody wants."""

    learner: int
    retired: tuple[int, ...] = ()


class Open(RankCommand, frozen=True, kw_only=True, tag="open"):
    """Make an engine. Paths are rank 0's; a rank on another machine has its own store."""

    assets: str
    log: LogLocation | None
    options: dict[str, Any]
    """Of `EngineOptions`, without the device."""
    threads: int
    modules: str
    """Where the file of a user's own objective lies."""


class LoadBase(RankCommand, frozen=True, kw_only=True, tag="load-base"):
    """Take what an adapter stands on, which rank 0 sends tensor by tensor."""


class Load(RankCommand, frozen=True, kw_only=True, tag="load"):
    """Take what is trained, which rank 0 sends tensor by tensor, and with `moments` AdamW's."""

    moments: bool
    updates: int


class Read(RankCommand, frozen=True, kw_only=True, tag="read"):
    """Help to read all that is trained, or all `moments` of it, in the order of their names."""

    moments: bool


class UnitCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What an objective sees as one trajectory (`step.Unit`)."""

    at: LoggedAt
    contexts: list[int]
    """Which of the record's are its rows, in order."""
    length: int
    """Counted tokens of these."""
    advantage: float
    """Of each of these."""
    weight: float
    """Of each of its tokens in the mean over the minibatch."""
    teacher: list[float] | None = None
    """Log-probs of its counted tokens under the teacher, which rank 0 alone asks."""


class PassCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One forward and backward pass."""

    units: list[UnitCommand]
    parts: list[Part]
    """In which the rows of the units are computed, in order."""


class ShareCommand(RankCommand, frozen=True, kw_only=True):
    """Base: first read the share and say so, then, if all could, compute."""

    settings: dict[str, Plain]
    reference: str
    """The weights that the KL is to, as rank 0 sees the file; a rank on another machine has its own
    store."""
    updates: list[list[list[PassCommand]]]
    """By update and rank. Ranks without a pass, or with fewer parts of one, stand idle in step with
    the others."""


class Train(ShareCommand, frozen=True, kw_only=True, tag="train"):
    """Train one step, an update after the other; or one part of it, whose only update is `later`
    where proximal log-probs are to be those of the weights that are kept."""

    later: bool = False


class Gather(ShareCommand, frozen=True, kw_only=True, tag="gather"):
    """Add the gradient of a part of a step, its only update, to what is there."""

    fresh: bool
    """Nothing is to be there."""


class Finish(RankCommand, frozen=True, kw_only=True, tag="finish"):
    """Divide the gradient that was gathered and update with it."""

    divisor: int
    learning_rate: float
    grad_norm_max: float


class Keep(RankCommand, frozen=True, kw_only=True, tag="keep"):
    """Keep a copy of what updates change, be as that is again, or let it go."""

    what: Literal["take", "go-back", "let-go"]


class LeaveDevice(RankCommand, frozen=True, kw_only=True, tag="leave-device"):
    """Make room on the device; the next command has everything come back."""


class EndRanks(RankCommand, frozen=True, kw_only=True, tag="end"):
    """The trainer is over."""


AnyCommand = Open | LoadBase | Load | Read | Train | Gather | Finish | Keep | LeaveDevice | EndRanks


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has read its share, or why it has not."""

    why: str = ""
    broken: bool = False
    """The log has other bytes than the batch was taken with (else it could not be read)."""
    records: int = 0
    """Read from the log."""


class UpdateReply(msgspec.Struct, kw_only=True):
    """What one update came to on one rank."""

    loss: float = 0.0
    """The rank's part."""
    router_aux: float = 0.0
    """Likewise, of the loss of routers, without its weight."""
    norm: float = 0.0
    """Of the gradients of all ranks together; 0 where they are only gathered."""
    padded_tokens: int = 0
    rows: list[list[RowFigures]] = []
    """By pass."""


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """The updates of a step; the last one may be one whose norm is not finite."""

    updates: list[UpdateReply]


COMMANDS: Final[msgspec.msgpack.Decoder[AnyCommand]] = msgspec.msgpack.Decoder(AnyCommand)

_NOWHERE: Final = LoggedAt(partition=0, offset=0, sha256="")


def shares(passes: Sequence[Pass], *, ranks: int) -> list[list[Pass]]:
    """The passes of each rank, in order; their numbers are new.

    Large passes are halved until every rank has one, as far as there are units. Ranks may differ by
    one pass; who has fewer stands idle in the last round.

    Example: five passes on two ranks: ``[[0, 3, 4], [1, 2]]`` by falling size.
    """
    cut = _halved(list(passes), ranks)
    cut.sort(key=lambda one: (-one.padded_tokens, one.number))
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
    """At least so many passes, by halving the largest again and again, if there are units."""
    while len(passes) < count:
        sized = [
            (one.padded_tokens, -place) for place, one in enumerate(passes) if len(one.units) > 1
        ]
        if not sized:
            break
        place = -max(sized)[1]
        passes[place : place + 1] = _halves(passes[place])
    for number, one in enumerate(passes):
        passes[number] = replace(one, number=number)
    return passes


def _halves(one: Pass) -> tuple[Pass, Pass]:
    middle, packing = (len(one.units) + 1) // 2, one.parts[0].packing
    halves = one.units[:middle], one.units[middle:]
    return one_pass(halves[0], packing=packing), one_pass(halves[1], packing=packing)


def places_of(batch: TrainBatch) -> dict[str, LoggedAt]:
    """Where each trajectory of a batch lies."""
    found: dict[str, LoggedAt] = {}
    for group in batch.groups:
        assert len(group.places) == len(group.trajectories), "several ranks need a log"
        named = [one.trajectory for one in group.trajectories]
        found |= zip(named, group.places, strict=True)
    return found


def share_commands(
    by_rank: Sequence[Sequence[Pass]], places: dict[str, LoggedAt]
) -> list[list[PassCommand]]:
    """The passes of each rank as rank 0 commands them; without places where it is alone."""
    return [[pass_command(one, places) for one in own] for own in by_rank]


def pass_command(one: Pass, places: dict[str, LoggedAt]) -> PassCommand:
    """A pass as rank 0 commands it."""
    units = [
        UnitCommand(
            at=places.get(unit.item.trajectory.trajectory, _NOWHERE),
            contexts=[row.context for row in unit.rows],
            length=unit.counted,
            advantage=unit.advantage,
            weight=unit.weight,
            teacher=None if unit.teacher is None else list(unit.teacher),
        )
        for unit in one.units
    ]
    return PassCommand(units=units, parts=list(one.parts))
