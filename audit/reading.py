"""Reads of whole topics and of named records."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.logged import Damage, PlaceReader, RecordPlace, logged_trajectory
from dora_pipe.core.errors import SchemaError
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.ledger.database import LoggedRecord
from dora_pipe.schemas.dead_letter import decode_dead_letter
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Trajectory

Buried = tuple[str, int, int]
"""Place of a record that became a dead letter."""

GARBAGE_MIN: Final = 50_000
"""New objects before a collection."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect garbage rarely: reading a log makes no cycles, and the search takes 10 %."""
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_MIN, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


@dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """Consistent ends of topics for a running run.

    Ends of named events and records are taken after the round's. Ends for unnamed ones are taken
    before: later ones may refer to decisions past the horizon.
    """

    trajectories_before: dict[TopicPartition, int]
    control_before: int
    decisions: int
    control: int
    trajectories: dict[TopicPartition, int]


def horizon_of(bus: Bus, topics: Topics) -> Horizon:
    """Return the current horizon; the order of calls matters. Raises BusError."""
    control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
    return Horizon(
        trajectories_before=ends_of(bus, topics.trajectories),
        control_before=bus.end(control),
        decisions=bus.end(decisions),
        control=bus.end(control),
        trajectories=ends_of(bus, topics.trajectories),
    )


def record_at(bus: Bus, tp: TopicPartition, offset: int) -> Record | None:
    return next(iter(records_at(bus, tp, [offset])), None)


def records_at(bus: Bus, tp: TopicPartition, offsets: Sequence[int]) -> Iterator[Record]:
    """Yield a partition's existing records at these offsets, in order."""
    end = bus.end(tp)
    places = [RecordPlace(tp.partition, offset) for offset in offsets if offset < end]
    with closing(PlaceReader(bus, tp.topic, gap=0)) as reader:
        yield from reader.read(places)


def trajectories_of(
    bus: Bus, topics: Topics, expected: Iterable[LoggedRecord], damage: Damage
) -> Iterator[Trajectory]:
    """Yield these trajectories, checked against control."""
    with closing(PlaceReader(bus, topics.trajectories)) as reader:
        for record, named in reader.named(expected, damage):
            yield logged_trajectory(record, named)


def read_buried(bus: Bus, topics: Topics) -> frozenset[Buried]:
    """Return the places of dead letters."""
    buried: set[Buried] = set()
    for record in records_of(bus, ends_of(bus, topics.dead_letters)):
        with suppress(SchemaError):
            letter = decode_dead_letter(record.value, record.headers)
            buried.add((letter.topic, letter.partition, letter.offset))
    return frozenset(buried)
