"""A role as a machine: inputs, outputs and the protocol that the loop drives.

A machine has no IO, clock or randomness. The loop is `core.loop.runtime`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

import msgspec

from dora_pipe.core.pure.records import Append, Record, TopicPartition

Effect = TypeVar("Effect")
"""Union of the effects that a role's machine starts."""

Event = TypeVar("Event")
EventIn = TypeVar("EventIn", contravariant=True)
"""Union of the events that a role's ports report."""

BUS_TURN_NS: Final = 100_000_000
"""Time between reads and appends: a durable append costs the same for one record as for ten. 200 ms
would cost a third of a small run's throughput, because a step is a chain of six turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Now:
    """Time of a reaction: monotonic ns for decisions, Unix ns for records."""

    mono_ns: int
    wall_ns: int


class Publish(msgspec.Struct, frozen=True, kw_only=True):
    """Record to append; a tag requests a `Published` event."""

    record: Append
    tag: str = ""
    lossy: bool = False
    """Status that may be lost (`Runtime.status`)."""


class Published(msgspec.Struct, frozen=True, kw_only=True):
    """Acknowledgement of a tagged record."""

    tag: str
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Everything in the log at start has been read, including held-back records."""


@dataclass(frozen=True, slots=True)
class HeldBack:
    """Partitions with acknowledged records that are not yet readable.

    Sent on changes; empty when all are readable.
    """

    partitions: tuple[TopicPartition, ...]


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Request to stop (SIGTERM, Ctrl-C); the machine ends in order."""


LoopEvent = Record | Published | CaughtUp | HeldBack | StopAsked
"""Inputs of every machine, from the loop."""


@dataclass(slots=True, kw_only=True)
class Outputs(Generic[Effect]):
    """Records to append, then effects to start, in order."""

    publish: list[Publish] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)


class Machine(Protocol[Effect, EventIn]):
    """Role without IO."""

    def positions(self) -> Mapping[TopicPartition, int]: ...

    def react(self, inputs: Sequence[LoopEvent | EventIn], now: Now) -> Outputs[Effect]:
        """Process inputs in order."""
        ...

    def wake_at(self) -> int:
        """Return when to call without inputs, monotonic ns."""
        ...

    @property
    def finished(self) -> bool: ...
