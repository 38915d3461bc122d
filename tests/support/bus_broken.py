"""Buses that break one promise each: the contract is worth as much as what it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dora_pipe.bus.memory import MemoryBus, MemoryLog, MemoryReader, MemoryWriter
from dora_pipe.bus.port import Append, Record, TopicPartition, TopicSpec
from dora_pipe.core.errors import BusError, OutcomeUnknown, TopicMissing


class DenseLog(MemoryLog):
    """Leaves no gap behind an append: last offset + 1 would be right, as it is on no real bus."""

    def gap_after(self, append: int) -> int:
        """None at all."""
        return 0


class LastOffsetReader(MemoryReader):
    """Believes that "caught up" is the last offset + 1."""

    def __init__(self, bus: MemoryBus, positions: Mapping[TopicPartition, int]) -> None:
        super().__init__(bus, positions)
        self._seen = dict(positions)

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        """Note the last offset of each partition."""
        found = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        self._seen.update({record.at: record.offset + 1 for record in found})
        return found

    def position(self, tp: TopicPartition) -> int:
        """Never beyond a gap."""
        return self._seen[tp]


class CarefreeReader(MemoryReader):
    """Believes that what it may see is all there is."""

    def held_back(self) -> list[TopicPartition]:
        """Never."""
        return []


class HeaderlessReader(MemoryReader):
    """Loses headers that carry nothing."""

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        """What came, less."""
        found = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        return [replace(each, headers=tuple(h for h in each.headers if h[1])) for each in found]


class UnboundedReader(MemoryReader):
    """Returns as many bytes as it likes."""

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 1 << 25
    ) -> list[Record]:
        """Not bounded by bytes."""
        return super().poll(timeout_s=timeout_s, records_max=records_max)


class UnfencedWriter(MemoryWriter):
    """Ignores newer writers of its name."""

    def _check_writable(self) -> None:
        if self._name is not None:
            self._epoch = self._bus.log._epochs[self._name]
        super()._check_writable()


class OneByOneWriter(MemoryWriter):
    """Appends what comes before the record that it refuses."""

    def append(self, records: Sequence[Append]) -> list[int]:
        """A call is not a whole."""
        append = super().append
        return [offset for record in records for offset in append([record])]


class ConfidentWriter(MemoryWriter):
    """Tells a failure where it does not know the outcome."""

    def append(self, records: Sequence[Append]) -> list[int]:
        """Would lead its caller to append the record again under the same epoch."""
        try:
            return super().append(records)
        except OutcomeUnknown as error:
            raise BusError(error.message) from error


class StubbornWriter(MemoryWriter):
    """Goes on as an exclusive writer although it does not know what it appended."""

    def append(self, records: Sequence[Append]) -> list[int]:
        """Never broken."""
        self._broken = False
        return super().append(records)


class CreatingBus(MemoryBus):
    """Creates a topic because somebody asked for it."""

    def partitions(self, topic: str) -> int:
        """How many there are, or now are."""
        try:
            return super().partitions(topic)
        except TopicMissing:
            self.create([TopicSpec(name=topic)])
            raise


def bus_with(
    *, reader: type[MemoryReader] = MemoryReader, writer: type[MemoryWriter] = MemoryWriter
) -> type[MemoryBus]:
    """A memory bus with another reader or writer."""

    class Broken(MemoryBus):
        def reader(self, positions: Mapping[TopicPartition, int]) -> MemoryReader:
            super().reader(positions)
            return reader(self, positions)

        def writer(self, *, exclusive: str | None = None) -> MemoryWriter:
            self.check_open()
            return writer(self, exclusive)

    return Broken
