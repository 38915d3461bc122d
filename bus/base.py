"""What buses and readers share: a bus around another, and a reader that keeps its positions itself.

A method without a docstring does what the port says of it. It decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dora_pipe.bus.checks import check_position
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition, TopicSpec, Writer
from dora_pipe.core.errors import BusError


class ReaderWrapper(Reader):
    """Everything as the inner reader does it, for those that change one thing of it."""

    def __init__(self, inner: Reader) -> None:
        self.inner = inner

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        return self.inner.poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)

    def position(self, tp: TopicPartition) -> int:
        return self.inner.position(tp)

    def held_back(self) -> list[TopicPartition]:
        return self.inner.held_back()

    def seek(self, tp: TopicPartition, position: int) -> None:
        self.inner.seek(tp, position)

    def close(self) -> None:
        self.inner.close()


class BusWrapper(Bus):
    """Everything as the inner bus does it, for those that change one thing of it."""

    def __init__(self, inner: Bus) -> None:
        self.inner = inner

    def create(self, topics: Sequence[TopicSpec]) -> None:
        self.inner.create(topics)

    def topics(self) -> list[str]:
        return self.inner.topics()

    def partitions(self, topic: str) -> int:
        return self.inner.partitions(topic)

    def begin(self, tp: TopicPartition) -> int:
        return self.inner.begin(tp)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        return self.inner.trim(tp, before)

    def end(self, tp: TopicPartition) -> int:
        return self.inner.end(tp)

    def written_end(self, tp: TopicPartition) -> int:
        return self.inner.written_end(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        return self.inner.reader(positions)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        return self.inner.writer(exclusive=exclusive)

    def close(self) -> None:
        self.inner.close()


class PositionReader(Reader):
    """Keeps its positions in `_positions`, where `poll` moves them; nobody is ever held back.

    `check_bus` raises BusError where the bus can no longer be used.
    """

    def __init__(
        self, positions: Mapping[TopicPartition, int], check_bus: Callable[[], None]
    ) -> None:
        self._positions = dict(positions)
        self._check_bus = check_bus
        self._closed = False

    def position(self, tp: TopicPartition) -> int:
        self._check_assigned(tp)
        return self._positions[tp]

    def held_back(self) -> list[TopicPartition]:
        self._check_open()
        return []

    def seek(self, tp: TopicPartition, position: int) -> None:
        self._check_assigned(tp)
        check_position(tp, position)
        self._positions[tp] = position

    def close(self) -> None:
        self._closed = True

    def _check_assigned(self, tp: TopicPartition) -> None:
        self._check_open()
        if tp not in self._positions:
            raise BusError(f"this reader does not read {tp.topic}/{tp.partition}")

    def _check_open(self) -> None:
        self._check_bus()
        if self._closed:
            raise BusError("this reader is closed")
