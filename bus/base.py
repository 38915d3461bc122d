"""Shared base classes of buses and readers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from typing import Final

from dora_pipe.bus.bus import Bus, Reader, TopicSpec, Writer
from dora_pipe.bus.checks import check_position
from dora_pipe.core.errors import BusError
from dora_pipe.core.pure.records import Record, TopicPartition

FAR: Final = 1000
"""Minimum records of topics that report progress."""

POLL_S: Final = 1.0
FIRST_WAIT_S: Final = 0.02
EMPTY_POLLS_MAX: Final = 60
RECORDS_MAX: Final = 2000
BYTES_MAX: Final = 4 * 1024 * 1024
Poll = Callable[[], list[Record]]

Report = Callable[[str, float, float], None]
"""Progress callback: phase, records read, total."""


def count_empty_polls(
    reader: Reader, partition: TopicPartition, before: int, *, moved: bool, polls_max: int
) -> int:
    """Return the consecutive polls without progress; held-back partitions do not count.

    Raises BusError above `polls_max`.
    """
    if moved or partition in reader.held_back():
        return 0 if moved else max(1, before)
    if before >= polls_max:
        raise BusError(
            f"timed out reading {partition.topic}/{partition.partition}: no record came at offset "
            f"{reader.position(partition)}, which is before its end",
            hint="check the broker and the network; `dora-pipe why` queries the broker",
        )
    return before + 1


def wait_after(empty: int) -> float:
    """Return the poll timeout in seconds after `empty` empty polls."""
    return min(POLL_S, FIRST_WAIT_S * 2 ** (empty - 1)) if empty else 0.0


def polls_until(
    reader: Reader,
    ends: Mapping[TopicPartition, int],
    *,
    records_max: int = RECORDS_MAX,
    attempt: Callable[[Poll], list[Record]] = lambda poll: poll(),
) -> Iterator[list[Record]]:
    """Yield the records below `ends`, one list per poll.

    `attempt` runs a poll. Raises BusError without progress.
    """
    empty = 0
    while behind := [tp for tp, end in ends.items() if reader.position(tp) < end]:
        before = [reader.position(tp) for tp in ends]
        # Keep the wait short: a gap advances the position but does not wake the poll.
        wait_s = wait_after(empty)
        records = attempt(
            partial(reader.poll, timeout_s=wait_s, records_max=records_max, bytes_max=BYTES_MAX)
        )
        yield [record for record in records if record.offset < ends[record.at]]
        moved = bool(records) or before != [reader.position(tp) for tp in ends]
        empty = count_empty_polls(reader, behind[0], empty, moved=moved, polls_max=EMPTY_POLLS_MAX)


def records_until(
    reader: Reader,
    ends: Mapping[TopicPartition, int],
    *,
    records_max: int = RECORDS_MAX,
    attempt: Callable[[Poll], list[Record]] = lambda poll: poll(),
) -> Iterator[Record]:
    """Yield the records below `ends`. Raises BusError without progress."""
    polls = polls_until(reader, ends, records_max=records_max, attempt=attempt)
    return chain.from_iterable(polls)


def ends_of(bus: Bus, topic: str) -> dict[TopicPartition, int]:
    partitions = [TopicPartition(topic, partition) for partition in range(bus.partitions(topic))]
    return {tp: bus.end(tp) for tp in partitions}


def records_of(
    bus: Bus, ends: Mapping[TopicPartition, int], *, start: int = 0
) -> Generator[Record, None, None]:
    """Yield records before these ends, in order per partition. Raises BusError."""
    with closing(bus.reader(dict.fromkeys(ends, start))) as reader:
        yield from records_until(reader, ends)


class ReaderWrapper(Reader):
    """Reader that forwards every call to an inner reader."""

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
    """Bus that forwards every call to an inner bus."""

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
    """Reader that keeps its positions in `_positions`.

    `check_bus` raises BusError if the bus is unusable.
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


class WatchedBus(BusWrapper):
    """Bus whose readers report their progress."""

    def __init__(self, bus: Bus, report: Report) -> None:
        super().__init__(bus)
        self._report = report

    def reader(self, positions: Mapping[TopicPartition, int]) -> Reader:
        ends = {partition: self.inner.end(partition) for partition in positions}
        return _WatchedReader(self.inner.reader(positions), dict(positions), ends, self._report)


class _WatchedReader(ReaderWrapper):
    def __init__(
        self,
        reader: Reader,
        starts: Mapping[TopicPartition, int],
        ends: Mapping[TopicPartition, int],
        report: Report,
    ) -> None:
        super().__init__(reader)
        self._starts, self._report = starts, report
        names = sorted({partition.topic.rpartition(".")[2] for partition in starts})
        self._phase = f"reading {', '.join(names)}"
        self._total = sum(ends[partition] - start for partition, start in starts.items())

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        records = super().poll(timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max)
        done = sum(self.position(partition) - start for partition, start in self._starts.items())
        if self._total >= FAR:
            self._report(self._phase, done, self._total)
        return records
