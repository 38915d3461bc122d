"""Reader of records at given offsets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeVar

from dora_pipe.bus.base import records_until
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.bus.logged import Damage, Named
from dora_pipe.core.pure.records import Record, TopicPartition

AnyNamed = TypeVar("AnyNamed", bound=Named)


class RecordPlace(NamedTuple):
    partition: int
    offset: int


class PlaceReader:
    """Seeking readers by partition; offsets within `gap` are read together, and `attempt` makes the
    calls."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        *,
        gap: int = 64,
        attempt: Callable[[Callable[[], Any]], Any] = lambda call: call(),
    ) -> None:
        self._bus = bus
        self._topic = topic
        self._gap = gap
        self._attempt = attempt
        self._readers: dict[TopicPartition, Reader] = {}

    def read(self, places: Iterable[RecordPlace]) -> Iterator[Record]:
        """Yield the records at these existing places, and any between. Raises BusError if they do
        not arrive.
        """
        for stretch in stretches(places, self._gap):
            source = TopicPartition(self._topic, stretch[0].partition)
            first, last = stretch[0].offset, stretch[-1].offset
            if source not in self._readers:
                self._readers[source] = self._attempt(partial(self._bus.reader, {source: first}))
            reader = self._readers[source]
            reader.seek(source, first)
            yield from records_until(
                reader, {source: last + 1}, records_max=last - first + 1, attempt=self._attempt
            )

    def named(self, named: Iterable[AnyNamed], damage: Damage) -> Iterator[tuple[Record, AnyNamed]]:
        """Yield the records that match their references, in order; record others in `damage`."""
        by_place = {(each.partition, each.offset): each for each in named}
        partitions = {partition for partition, _ in by_place}
        ends = {number: self._bus.end(TopicPartition(self._topic, number)) for number in partitions}
        there = [RecordPlace(*key) for key in by_place if key[1] < ends[key[0]]]
        for record in self.read(there):
            logged = by_place.pop((record.partition, record.offset), None)
            if logged is not None and damage.is_sound(record, logged):
                yield record, logged
        damage.look_for_the_rest(by_place)

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()


def stretches(places: Iterable[RecordPlace], gap: int) -> list[list[RecordPlace]]:
    """Group places of one partition within `gap` of each other, sorted."""
    grouped: list[list[RecordPlace]] = []
    for position in sorted(places):
        last = grouped[-1][-1] if grouped else None
        near = last is not None and last.partition == position.partition
        if last is not None and near and position.offset - last.offset <= gap:
            grouped[-1].append(position)
        else:
            grouped.append([position])
    return grouped
