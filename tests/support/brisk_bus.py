"""A bus whose readers never wait, and that a role may stop listening to; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition, TopicSpec, Writer


@dataclass
class Ears:
    """What a role hears; while `deaf`, nothing that others write reaches its loop."""

    deaf: bool = False


class _BriskReader:
    """A reader that never waits: time belongs to the cluster."""

    def __init__(self, reader: Reader, ears: Ears) -> None:
        self._reader = reader
        self._ears = ears

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        if self._ears.deaf:
            return []
        return self._reader.poll(timeout_s=0.0, records_max=records_max, bytes_max=bytes_max)

    def position(self, tp: TopicPartition) -> int:
        return self._reader.position(tp)

    def seek(self, tp: TopicPartition, position: int) -> None:
        self._reader.seek(tp, position)

    def close(self) -> None:
        self._reader.close()


class BriskBus:
    """A bus whose readers never wait."""

    def __init__(self, bus: Bus, ears: Ears) -> None:
        self._bus = bus
        self._ears = ears

    def create(self, topics: Sequence[TopicSpec]) -> None:
        self._bus.create(topics)

    def topics(self) -> list[str]:
        return self._bus.topics()

    def partitions(self, topic: str) -> int:
        return self._bus.partitions(topic)

    def begin(self, tp: TopicPartition) -> int:
        return self._bus.begin(tp)

    def end(self, tp: TopicPartition) -> int:
        return self._bus.end(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _BriskReader(self._bus.reader(positions), self._ears)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        return self._bus.writer(exclusive=exclusive)

    def close(self) -> None:
        self._bus.close()
