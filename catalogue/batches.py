"""A batch and its parts: when each was taken, when the trainer computed it, what it waited for.

A commit says how many seconds were spent on each part ahead of the batch. When they began follows:
the part was there, and the trainer was free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dora_pipe.catalogue.marks import Stop, stopped_ns
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.rounds import TakeBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PartTaken:
    """A part as it was decided; the last one of a batch is what was taken with that."""

    groups: tuple[str, ...]
    taken_ns: int
    reason: str
    last: TrajectoryLogged | None
    """The record that came last of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch decision in force."""

    take: TakeBatch
    taken_ns: int
    round: int
    free_ns: int
    """The trainer was free: the commit before, or its own start; 0 while it is not there."""
    last: TrajectoryLogged | None
    """The record that came last of it."""
    parts: tuple[PartTaken, ...]
    """All of them; none where it was taken as one."""
    part_of: Mapping[str, int]
    """Which part each of its groups is in, where it has several."""

    def taken_of(self, group: str) -> PartTaken | None:
        """The part that a group is in; None where the batch was taken as one."""
        number = self.part_of.get(group)
        return None if number is None else self.parts[number]

    def taken_ns_of(self, group: str) -> int:
        part = self.taken_of(group)
        return self.taken_ns if part is None else part.taken_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PartComputed:
    """A part of a committed step."""

    part: int
    taken: PartTaken
    free_ns: int
    """The trainer was free for it."""
    seconds: float | None
    """What was spent on it ahead of the batch; None: it was computed with that."""
    stops: Sequence[Stop] = ()

    @property
    def begun_ns(self) -> int:
        """It was there, and the trainer was free."""
        return max(self.free_ns, self.taken.taken_ns)

    @property
    def ended_ns(self) -> int:
        """The trainer was free again; of one that was computed with the batch, as if at once."""
        return self.begun_ns + int((self.seconds or 0.0) * 1e9)

    @property
    def waited_s(self) -> float:
        """The trainer was free and it was not there."""
        stopped = stopped_ns(self.stops, self.free_ns, self.begun_ns)
        return (self.begun_ns - self.free_ns - stopped) / 1e9


def computed(
    parts: Sequence[PartTaken], ahead_s: Sequence[float], free_ns: int, stops: Sequence[Stop] = ()
) -> Iterator[PartComputed]:
    """All parts of a step, in order, for which the trainer was free at `free_ns`."""
    for number, taken in enumerate(parts):
        seconds = ahead_s[number] if number < len(ahead_s) else None
        one = PartComputed(part=number, taken=taken, free_ns=free_ns, seconds=seconds, stops=stops)
        yield one
        free_ns = one.ended_ns


def batch_of(
    take: TakeBatch, parts: Sequence[PartTaken], *, taken_ns: int, round_: int, free_ns: int
) -> Batch:
    """A batch that was taken in these parts, or as one."""
    arrived = [one.last for one in parts if one.last is not None]
    several = tuple(parts) if len(parts) > 1 else ()
    numbered = enumerate(several)
    return Batch(
        take=take,
        taken_ns=taken_ns,
        round=round_,
        free_ns=free_ns,
        last=max(arrived, key=arrival, default=None),
        parts=several,
        part_of={name: number for number, part in numbered for name in part.groups},
    )


def arrival(fact: TrajectoryLogged) -> tuple[int, str]:
    """Orders records as they came."""
    return fact.at_ns, fact.trajectory
