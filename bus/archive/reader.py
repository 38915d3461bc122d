"""The log in an archive: the reading half of the port; decides nothing, and writes nothing.

Positions mean what they mean in the log that was archived: gaps are passed, `end` is the cut. What
is read has the sha256 that the manifest names; the manifest's chain is checked when it is opened.
An archive that grows is followed: a waiting poll looks for a newer manifest.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dora_pipe.bus.archive.manifest import MANIFEST, SEGMENTS, Entry, Manifest, read_manifest
from dora_pipe.bus.archive.segment import Segment, read_segment
from dora_pipe.bus.checks import (
    OpenedHere,
    check_exists,
    check_not_truncated,
    check_position,
    record_bytes,
    topic_missing,
)
from dora_pipe.bus.port import Record, TopicPartition, TopicSpec, Writer
from dora_pipe.core.errors import BusError

WAIT_S: Final = 0.2
"""How often a waiting poll looks for a newer manifest."""

SEGMENTS_HELD_MAX: Final = 2
"""A bus keeps so many segments in memory: readers that jump come back to the same one."""


class ArchiveBus:
    """The log in the archive at `path`.

    Example: ``ArchiveBus(Path("kept/demo"))``
    """

    def __init__(self, path: Path | str) -> None:
        """Raises LogTruncated, SchemaError, InvariantBroken (see `read_manifest`)."""
        self.path = Path(path)
        self.here = OpenedHere(f"the archive {self.path}")
        self._held: OrderedDict[str, Segment] = OrderedDict()
        self._seen: tuple[int, ...] = ()
        self.manifest: Manifest
        self._specs: dict[str, TopicSpec]
        self._index: dict[TopicPartition, _Index]
        self.refresh()

    def refresh(self) -> bool:
        """Read the manifest again if it was replaced; whether it was."""
        self.here.check()
        seen = self._stamp()
        if seen and seen == self._seen:
            return False
        self.manifest = read_manifest(self.path)
        self._seen = seen
        self._specs = {
            name: TopicSpec(name=name, partitions=count)
            for name, count in self.manifest.topics.items()
        }
        self._index = {}
        for entry in self.manifest.entries:
            self._index.setdefault(entry.at, _Index()).add(entry)
        return True

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = (self.path / MANIFEST).stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def create(self, topics: Sequence[TopicSpec]) -> None:
        """Nothing can be created. Raises BusError."""
        raise self._refusal()

    def topics(self) -> list[str]:
        """Names of all topics, sorted."""
        self.here.check()
        return sorted(self._specs)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        self.here.check()
        if topic not in self._specs:
            raise topic_missing(topic)
        return self._specs[topic].partitions

    def begin(self, tp: TopicPartition) -> int:
        """The first position: an archive deletes nothing."""
        self.here.check()
        check_exists(tp, self._specs)
        return 0

    def trim(self, tp: TopicPartition, before: int) -> bool:
        """Nothing can be deleted. Raises BusError."""
        raise self._refusal()

    def end(self, tp: TopicPartition) -> int:
        """The position at which the archive was cut."""
        self.here.check()
        check_exists(tp, self._specs)
        return self.manifest.cut[tp.topic][tp.partition]

    def written_end(self, tp: TopicPartition) -> int:
        """The same: an archive holds what could be read."""
        return self.end(tp)

    def sealed(self, tp: TopicPartition) -> int:
        """How far segments of a partition go, behind the cut too: what a pass left that died."""
        return max((one.end for one in self.manifest.entries if one.at == tp), default=0)

    def reader(self, positions: Mapping[TopicPartition, int]) -> ArchiveReader:
        """A reader of exactly these partitions."""
        self.here.check()
        for tp, position in positions.items():
            check_exists(tp, self._specs)
            check_position(tp, position)
        return ArchiveReader(self, positions)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        """Nothing can be written. Raises BusError."""
        raise self._refusal()

    def _refusal(self) -> BusError:
        return BusError(
            f"the archive {self.path} cannot be written to",
            hint="the run's own log can; `dora-pipe archive RUN --to DIR` lets an archive grow",
        )

    def entry_at(self, tp: TopicPartition, position: int) -> Entry:
        """The entry that covers a position before `end`."""
        return self._index[tp].at(position)

    def segment(self, entry: Entry) -> Segment:
        """A segment, checked when it is read. Raises LogTruncated, InvariantBroken."""
        held = self._held.pop(entry.chain, None)
        if held is None:
            while len(self._held) >= SEGMENTS_HELD_MAX:
                self._held.popitem(last=False)
            held = read_segment(self.path / SEGMENTS / entry.file, entry)
        self._held[entry.chain] = held
        return held

    def close(self) -> None:
        """Close the bus with its readers."""
        self.here.close()
        self._held.clear()


class _Index:
    """A partition's entries by position."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """The next one."""
        self._starts.append(entry.start)
        self._entries.append(entry)

    def at(self, position: int) -> Entry:
        """The one that covers it."""
        return self._entries[bisect_right(self._starts, position) - 1]


@dataclass(slots=True)
class _Page:
    """The batch that a reader is in: its records, and the next one."""

    chain: str
    batch: int
    records: list[Record]
    next: int = 0


class ArchiveReader:
    """Reads one partition after the other, so that each segment is opened once."""

    def __init__(self, bus: ArchiveBus, positions: Mapping[TopicPartition, int]) -> None:
        self._bus = bus
        self._positions = dict(positions)
        self._pages: dict[TopicPartition, _Page] = {}
        self._closed = False

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """Records from the present positions on; waits while the archive has none."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            found = self.take(records_max, bytes_max)
            left_s = deadline_s - time.monotonic()
            if found or left_s <= 0:
                return found
            time.sleep(min(WAIT_S, left_s))
            self._bus.refresh()

    def take(self, records_max: int, bytes_max: int) -> list[Record]:
        """What is there now."""
        self._check_open()
        found: list[Record] = []
        for tp in self._positions:
            check_not_truncated(tp, self._positions[tp], self._bus.end(tp))
            bytes_max = self._take(tp, found, records_max, bytes_max)
        return found

    def _take(
        self, tp: TopicPartition, found: list[Record], records_max: int, room_bytes: int
    ) -> int:
        """Move a partition's records into `found`; the bytes left, 0 when there is no more room."""
        end = self._bus.end(tp)
        while self._positions[tp] < end:
            page = self._page(tp)
            if page is None:
                continue
            for record in page.records[page.next :]:
                size_bytes = record_bytes(record)
                if len(found) >= records_max or (found and size_bytes > room_bytes):
                    return 0
                found.append(record)
                room_bytes -= size_bytes
                page.next += 1
                self._positions[tp] = record.offset + 1
        return room_bytes

    def _page(self, tp: TopicPartition) -> _Page | None:
        """The page with the next record; None when the position moved over a gap instead."""
        page = self._pages.get(tp)
        if page is not None and page.next < len(page.records):
            return page
        position = self._positions[tp]
        entry = self._bus.entry_at(tp, position)
        if entry.records:
            segment = self._bus.segment(entry)
            batch = segment.batch_from(position)
            records = segment.records(batch)
            first = next((i for i, one in enumerate(records) if one.offset >= position), -1)
            if first >= 0:
                self._pages[tp] = _Page(entry.chain, batch, records, first)
                return self._pages[tp]
        self._pages.pop(tp, None)
        self._positions[tp] = min(entry.end, self._bus.end(tp))
        return None

    def position(self, tp: TopicPartition) -> int:
        """The first offset not passed yet."""
        self._check_assigned(tp)
        return self._positions[tp]

    def held_back(self) -> list[TopicPartition]:
        """Nothing ever is."""
        self._check_open()
        return []

    def seek(self, tp: TopicPartition, position: int) -> None:
        """Go on from `position`."""
        self._check_assigned(tp)
        check_position(tp, position)
        self._positions[tp] = position
        self._turn_to(tp, position)

    def _turn_to(self, tp: TopicPartition, position: int) -> None:
        """Stay on the page if the position lies on it: looking things up one by one does that."""
        page = self._pages.get(tp)
        if page is None:
            return
        if page.records[0].offset <= position <= page.records[-1].offset:
            page.next = next(i for i, one in enumerate(page.records) if one.offset >= position)
        else:
            del self._pages[tp]

    def close(self) -> None:
        """Let go of everything."""
        self._closed = True
        self._pages.clear()

    def _check_assigned(self, tp: TopicPartition) -> None:
        self._check_open()
        if tp not in self._positions:
            raise BusError(f"this reader does not read {tp.topic}/{tp.partition}")

    def _check_open(self) -> None:
        self._bus.here.check()
        if self._closed:
            raise BusError("this reader is closed")
