"""What crosses between the ranks of a trainer: commands of rank 0, replies of the others.

Decisions only: which records of the log a rank trains on, and how. Trajectories never cross; every
rank reads its own from the log. (Weights do, when they are loaded and published.)
"""

from __future__ import annotations

from typing import Any

import msgspec

from dora_pipe.consumers.learners.port import LoggedAt
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
    reference: str
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


class RowCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One trajectory to train on."""

    at: LoggedAt
    advantage: float
    weight: float
    """Of each of its tokens in the mean over the minibatch."""


class PassCommand(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One forward and backward pass."""

    rows: list[RowCommand]
    width: int


class Train(RankCommand, frozen=True, kw_only=True, tag="train"):
    """Train one step: first read the share and say so, then, if all could, compute."""

    settings: dict[str, Plain]
    updates: list[list[list[PassCommand]]]
    """By update and rank. Ranks without a pass stand idle in step with the others."""


class End(RankCommand, frozen=True, kw_only=True, tag="end"):
    """The trainer is over."""


AnyCommand = Open | LoadBase | Load | Read | Train | End


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A rank has read its share, or why it has not."""

    why: str = ""
    broken: bool = False
    """The log has other bytes than the batch was taken with (else it could not be read)."""
    records: int = 0
    """Read from the log."""


class UpdateReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one update came to on one rank."""

    loss: float
    """The rank's part."""
    norm: float
    """Of the gradients of all ranks together."""
    padded_tokens: int
    rows: list[list[RowFigures]]
    """By pass."""


class StepReply(msgspec.Struct, frozen=True, kw_only=True):
    """The updates of a step; the last one may be one whose norm is not finite."""

    updates: list[UpdateReply]


_COMMANDS: msgspec.msgpack.Decoder[AnyCommand] = msgspec.msgpack.Decoder(AnyCommand)


def decode_command(data: bytes) -> AnyCommand:
    """A command as rank 0 sent it."""
    return _COMMANDS.decode(data)
