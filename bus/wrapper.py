"""A bus and a reader around others, for those that change one thing of them; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition, TopicSpec, Writer


class ReaderWrapper:
    """Everything as the inner reader does it. See `dora_pipe.bus.port.Reader`."""

    def __init__(self, inner: Reader) -> None:
        self.inner = inner

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """See Reader."""
        return self.inner.poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)

    def position(self, tp: TopicPartition) -> int:
        """See Reader."""
        return self.inner.position(tp)

    def held_back(self) -> list[TopicPartition]:
        """See Reader."""
        return self.inner.held_back()

    def seek(self, tp: TopicPartition, position: int) -> None:
        """See Reader."""
        self.inner.seek(tp, position)

    def close(self) -> None:
        """See Reader."""
        self.inner.close()


class BusWrapper:
    """Everything as the inner bus does it. See `dora_pipe.bus.port.Bus`."""

    def __init__(self, inner: Bus) -> None:
        self.inner = inner

    def create(self, topics: Sequence[TopicSpec]) -> None:
        """See Bus."""
        self.inner.create(topics)

    def topics(self) -> list[str]:
        """See Bus."""
        return self.inner.topics()

    def partitions(self, topic: str) -> int:
        """See Bus."""
        return self.inner.partitions(topic)

    def begin(self, tp: TopicPartition) -> int:
        """See Bus."""
        return self.inner.begin(tp)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """See Bus."""
        return self.inner.trim(tp, before)

    def end(self, tp: TopicPartition) -> int:
        """See Bus."""
        return self.inner.end(tp)

    def written_end(self, tp: TopicPartition) -> int:
        """See Bus."""
        return self.inner.written_end(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        """See Bus."""
        return self.inner.reader(positions)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        """See Bus."""
        return self.inner.writer(exclusive=exclusive)

    def close(self) -> None:
        """See Bus."""
        self.inner.close()
