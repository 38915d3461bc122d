"""What crosses between the ranks of a trainer: orders of rank 0, replies of the others.

Decisions only: which records of the log a rank trains on, and how. Trajectories never cross; every
rank reads its own from the log. (Weights do, when they are loaded and published.)
"""

from __future__ import annotations

from typing import Any

import msgspec

from dora_pipe.consumers.objectives.terms import RowFigures
from dora_pipe.consumers.trainers.port import LoggedAt
from dora_pipe.policies.log_place import LogPlace

Plain = float | int | str | bool


class Order(msgspec.Struct, frozen=True, kw_only=True, tag_field="order"):
    """Base. `trainer` numbers the trainers of a process; `retired` are those nobody wants."""

    trainer: int
    retired: tuple[int, ...] = ()


class Open(Order, frozen=True, kw_only=True, tag="open"):
    """Make an engine. Paths are rank 0's; a rank on another machine has its own store."""

    assets: str
    reference: str
    log: LogPlace | None
    options: dict[str, Any]
    """Of `EngineOptions`, without the device."""
    threads: int


class LoadBase(Order, frozen=True, kw_only=True, tag="load-base"):
    """Take what an adapter stands on, which rank 0 sends tensor by tensor."""


class Load(Order, frozen=True, kw_only=True, tag="load"):
    """Take what is trained, which rank 0 sends tensor by tensor, and with `moments` AdamW's."""

    moments: bool
    updates: int


class Read(Order, frozen=True, kw_only=True, tag="read"):
    """Help to read all that is trained, or all `moments` of it, in the order of their names."""

    moments: bool


class RowOrder(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One trajectory to train on."""

    at: LoggedAt
    advantage: float
    weight: float
    """Of each of its tokens in the mean over the minibatch."""


class PassOrder(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One forward and backward pass."""

    rows: list[RowOrder]
    width: int


class Train(Order, frozen=True, kw_only=True, tag="train"):
    """Train one step: first read the share and say so, then, if all could, compute."""

    settings: dict[str, Plain]
    updates: list[list[list[PassOrder]]]
    """By update and rank. Ranks without a pass stand idle in step with the others."""


class End(Order, frozen=True, kw_only=True, tag="end"):
    """The trainer is over."""


AnyOrder = Open | LoadBase | Load | Read | Train | End


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


_ORDERS: msgspec.msgpack.Decoder[AnyOrder] = msgspec.msgpack.Decoder(AnyOrder)


def decode_order(data: bytes) -> AnyOrder:
    """An order as rank 0 sent it."""
    return _ORDERS.decode(data)
