"""A log whose readers say how far they are, for the progress of a command; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.cli.progress import Progress

FAR: Final = 1000
"""A shorter way through a topic is not told."""


class WatchedBus(BusWrapper):
    """A log whose readers tell how far they are."""

    def __init__(self, bus: Bus, told: Progress) -> None:
        super().__init__(bus)
        self._told = told

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        """See the port."""
        ends = {at: self.inner.end(at) for at in positions}
        return _WatchedReader(self.inner.reader(positions), dict(positions), ends, self._told)


class _WatchedReader(ReaderWrapper):
    def __init__(
        self,
        reader: Reader,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        told: Progress,
    ) -> None:
        super().__init__(reader)
        self._starts, self._told = starts, told
        names = sorted({at.topic.rpartition(".")[2] for at in starts})
        self._phase = f"reading {', '.join(names)}"
        self._way = sum(ends[at] - start for at, start in starts.items())

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """See the port."""
        found = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        way = sum(self.position(at) - start for at, start in self._starts.items())
        if self._way >= FAR:
            self._told(self._phase, way, self._way)
        return found
