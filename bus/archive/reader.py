"""The log in an archive: the reading half of the port; decides nothing, and writes nothing.

Positions mean what they mean in the log that was archived: gaps are passed, `end` is the cut. What
is read has the sha256 that the manifest names; the manifest's chain is checked when it is opened.
An archive that grows is followed: a waiting poll looks for a newer manifest.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Final

from dora_pipe.bus.archive.manifest import MANIFEST, SEGMENTS, Entry, Manifest, read_manifest
from dora_pipe.bus.archive.segment import Segment, read_segment
from dora_pipe.bus.base import PositionReader
from dora_pipe.bus.checks import (
    OpenedHere,
    check_exists,
    check_not_truncated,
    check_position,
    record_bytes,
    topic_missing,
)
from dora_pipe.bus.port import Bus, Record, TopicPartition, TopicSpec, Writer
from dora_pipe.core.errors import BusError

WAIT_S: Final = 0.2
"""How often a waiting poll looks for a newer manifest."""

SEGMENTS_HELD_MAX: Final = 2
"""A bus keeps so many segments in memory: readers that jump come back to the same one."""


class ArchiveBus(Bus):
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
        self._index: dict[TopicPartition, list[Entry]]
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
            self._index.setdefault(entry.at, []).append(entry)
        return True

    def _stamp(self) -> tuple[int, ...]:
        try:
            found = (self.path / MANIFEST).stat()
        except OSError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def create(self, topics: Sequence[TopicSpec]) -> None:
        raise self._refusal()

    def topics(self) -> list[str]:
        self.here.check()
        return sorted(self._specs)

    def partitions(self, topic: str) -> int:
        self.here.check()
        if topic not in self._specs:
            raise topic_missing(topic)
        return self._specs[topic].partitions

    def begin(self, tp: TopicPartition) -> int:
        self.here.check()
        check_exists(tp, self._specs)
        return 0

    def trim(self, tp: TopicPartition, before: int) -> bool:
        raise self._refusal()

    def end(self, tp: TopicPartition) -> int:
        """The position at which the archive was cut."""
        self.here.check()
        check_exists(tp, self._specs)
        return self.manifest.cut[tp.topic][tp.partition]

    def written_end(self, tp: TopicPartition) -> int:
        return self.end(tp)  # an archive holds what could be read

    def sealed(self, tp: TopicPartition) -> int:
        """How far segments of a partition go, behind the cut too: what a pass left that died."""
        return self._index[tp][-1].end if tp in self._index else 0

    def reader(self, positions: Mapping[TopicPartition, int]) -> ArchiveReader:
        self.here.check()
        for tp, position in positions.items():
            check_exists(tp, self._specs)
            check_position(tp, position)
        return ArchiveReader(self, positions)

    def writer(self, *, exclusive: str | None = None) -> Writer:
        raise self._refusal()

    def _refusal(self) -> BusError:
        return BusError(
            f"the archive {self.path} cannot be written to",
            hint="the run's own log can; `dora-pipe archive RUN --to DIR` lets an archive grow",
        )

    def entry_at(self, tp: TopicPartition, position: int) -> Entry:
        """The entry that covers a position before `end`."""
        entries = self._index[tp]
        return entries[bisect_right(entries, position, key=attrgetter("start")) - 1]

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
        self.here.close()
        self._held.clear()


class ArchiveReader(PositionReader):
    """Reads one partition after the other, so that each segment is opened once."""

    def __init__(self, bus: ArchiveBus, positions: Mapping[TopicPartition, int]) -> None:
        super().__init__(positions, bus.here.check)
        self._bus = bus
        self._batches: dict[TopicPartition, list[Record]] = {}
        """Where each position lies, or did: looking records up one by one stays on the same."""

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
            for record in self._batch_at(tp):
                size_bytes = record_bytes(record)
                if len(found) >= records_max or (found and size_bytes > room_bytes):
                    return 0
                found.append(record)
                room_bytes -= size_bytes
                self._positions[tp] = record.offset + 1
        return room_bytes

    def _batch_at(self, tp: TopicPartition) -> list[Record]:
        """The rest of a batch from the position on; none where that moved over a gap instead."""
        position = self._positions[tp]
        batch = self._batches.get(tp)
        if not batch or not batch[0].offset <= position <= batch[-1].offset:
            entry = self._bus.entry_at(tp, position)
            batch = self._bus.segment(entry).batch_from(position) if entry.records else []
            self._batches[tp] = batch
            following = batch[0].offset if batch else entry.end
            self._positions[tp] = min(max(position, following), self._bus.end(tp))
        return batch[bisect_left(batch, position, key=attrgetter("offset")) :]

    def close(self) -> None:
        super().close()
        self._batches.clear()
