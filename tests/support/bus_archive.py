"""Harnesses whose readers read an archive, or an archive below a log that lost its beginning.

Writing goes to a log; everything appended is archived at once, so that the reading checks of the
bus contract ask of an archive what they ask of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from dora_pipe.audit.reading import records_of
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.tiered import TieredBus
from dora_pipe.bus.archive.writer import ArchiveWriter
from dora_pipe.bus.base import BusWrapper
from dora_pipe.bus.memory import MemoryBus, MemoryLog
from dora_pipe.bus.port import Append, Bus, Record, TopicPartition, TopicSpec, Writer
from tests.support.bus_harness import MemoryHarness

SMALL_BYTES = 64
"""Segments so small that nearly every append makes one."""


def archive_all(
    bus: Bus, directory: Path, *, segment_bytes: int = SMALL_BYTES, upto: int | None = None
) -> None:
    """Archive every topic of a log, each partition to its end (or to `upto`), and cut there."""
    topics = {topic: bus.partitions(topic) for topic in bus.topics()}
    with closing(ArchiveWriter(directory, "run", topics, segment_bytes=segment_bytes)) as writer:
        for tp in partitions_of(topics):
            end = bus.end(tp) if upto is None else min(upto, bus.end(tp))
            start = writer.position(tp)
            if end > start:
                writer.seal(tp, records_of(bus, {tp: end}, start=start), end)
        writer.cut()


def partitions_of(topics: Mapping[str, int]) -> list[TopicPartition]:
    return [TopicPartition(topic, one) for topic, count in topics.items() for one in range(count)]


class ArchivedBus(BusWrapper):
    """Appends to a log in memory and archives it; reads the archive."""

    def __init__(self, log: MemoryLog, folder: Path) -> None:
        self.live = MemoryBus(log)
        self.folder = folder
        self._open: list[Bus] = []

    def view(self) -> Bus:
        """What readers see now."""
        place = self.folder / "-".join(self.live.topics())  # an archive's topics never change
        archive_all(self.live, place)
        made = ArchiveBus(place)
        self._open.append(made)
        return made

    @property
    def inner(self) -> Bus:  # type: ignore[override]
        return self.view()

    def create(self, topics: Sequence[TopicSpec]) -> None:
        self.live.create(topics)

    def trim(self, tp: TopicPartition, before: int) -> bool:
        return self.live.trim(tp, before)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        return _ArchivingWriter(self, self.live.writer(exclusive=exclusive))

    def close(self) -> None:
        for bus in (*self._open, self.live):
            bus.close()


class _ArchivingWriter(Writer):
    """Archives behind every append, so that readers that are open find it."""

    def __init__(self, bus: ArchivedBus, inner: Writer) -> None:
        self._bus = bus
        self._inner = inner

    def append(self, records: Sequence[Append]) -> list[int]:
        offsets = self._inner.append(records)
        self._bus.view()
        return offsets

    def close(self) -> None:
        self._inner.close()


class CutBus(ArchivedBus):
    """The same, but what readers see is tiered: the log forgets half of what the archive has."""

    def view(self) -> Bus:
        archive = super().view()
        assert isinstance(archive, ArchiveBus)
        log = self.live.log
        for tp in partitions_of({topic: self.live.partitions(topic) for topic in archive.topics()}):
            log.delete_before(tp, archive.end(tp) // 2)
        made = TieredBus(archive, MemoryBus(log))
        self._open.append(made)
        return made


class ArchiveHarness(MemoryHarness):
    """Readers read an archive."""

    waits = True

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def leave_open(self, topic: str) -> Callable[[], None] | None:
        """An archive holds what could be read."""
        return None

    def open(self) -> Bus:
        return self.keep(ArchivedBus(self.log, self.folder))


class SpliceHarness(ArchiveHarness):
    """Readers read an archive below a log."""

    waits = False

    def open(self) -> Bus:
        return self.keep(CutBus(self.log, self.folder))


def everything(bus: Bus, tps: Iterable[TopicPartition]) -> dict[TopicPartition, list[Record]]:
    """Every record of partitions, from the first position on."""
    return {tp: list(records_of(bus, {tp: bus.end(tp)}, start=bus.begin(tp))) for tp in tps}


def log_in_memory(bus: Bus) -> MemoryLog:
    """A copy of a log with the same offsets and ends, whose beginning can be deleted."""
    log = MemoryLog()
    names = {topic: bus.partitions(topic) for topic in bus.topics()}
    MemoryBus(log).create([TopicSpec(name=one, partitions=count) for one, count in names.items()])
    for tp, records in everything(bus, partitions_of(names)).items():
        held = log._partitions[tp]
        held.records, held.offsets = records, [record.offset for record in records]
        held.visible_ms, held.end = [0] * len(records), bus.end(tp)
    return log
