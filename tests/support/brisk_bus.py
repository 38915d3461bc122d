"""A bus whose readers never wait, and that a role may stop listening to; decides nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dora_pipe.bus.base import BusWrapper, ReaderWrapper
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition


@dataclass
class Ears:
    """What a role hears; while `deaf`, nothing that others write reaches its loop."""

    deaf: bool = False


class _BriskReader(ReaderWrapper):
    """A reader that never waits: time belongs to the cluster."""

    def __init__(self, reader: Reader, ears: Ears) -> None:
        super().__init__(reader)
        self._ears = ears

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        if self._ears.deaf:
            return []
        return super().poll(timeout_s=0.0, records_max=records_max, bytes_max=bytes_max)


class BriskBus(BusWrapper):
    """A bus whose readers never wait."""

    def __init__(self, bus: Bus, ears: Ears) -> None:
        super().__init__(bus)
        self._ears = ears

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return _BriskReader(self.inner.reader(positions), self._ears)
