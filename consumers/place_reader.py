"""Reader of records at given offsets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dora_pipe.bus.base import RECORDS_MAX, records_until
from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.core.loop.retry import retry_bus
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock


class RecordPlace(NamedTuple):
    """Partition and offset of a record."""

    partition: int
    offset: int


class PlaceReader:
    """Seeking readers by partition; offsets within `gap` are read together."""

    def __init__(self, bus: Bus, topic: str, clock: Clock, *, gap: int) -> None:
        self._bus = bus
        self._topic = topic
        self._clock = clock
        self._gap = gap
        self._readers: dict[int, Reader] = {}

    def read(self, places: Iterable[RecordPlace]) -> Iterator[Record]:
        """Yield the records at these existing places, and any between. Raises BusError if they do
        not arrive.
        """
        for stretch in stretches(places, self._gap):
            yield from self._read_stretch(stretch)

    def close(self) -> None:
        """Close the readers; idempotent."""
        for reader in self._readers.values():
            reader.close()

    def _read_stretch(self, stretch: Sequence[RecordPlace]) -> Iterator[Record]:
        partition, first, last = stretch[0].partition, stretch[0].offset, stretch[-1].offset
        topic_partition = TopicPartition(self._topic, partition)
        if partition not in self._readers:
            self._readers[partition] = retry_bus(
                "reading", lambda: self._bus.reader({topic_partition: first}), self._clock
            )
        reader = self._readers[partition]
        reader.seek(topic_partition, first)
        yield from read_until(
            reader, topic_partition, last + 1, self._clock, records_max=last - first + 1
        )


def read_until(
    reader: Reader,
    topic_partition: TopicPartition,
    end: int,
    clock: Clock,
    *,
    records_max: int = RECORDS_MAX,
) -> Iterator[Record]:
    """Yield existing records up to `end`. Raises BusError if they do not arrive."""
    what = f"reading {topic_partition.topic}"
    return records_until(
        reader,
        {topic_partition: end},
        records_max=records_max,
        attempt=lambda poll: retry_bus(what, poll, clock),
    )


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
