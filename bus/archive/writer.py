"""Writes an archive: seals segments one after the other; decides when one is full.

What a segment holds never changes once the manifest names it. A process may die at any point: the
last manifest stays valid, and the next writer goes on behind it and writes over what it does not
name.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from dora_pipe.bus.archive.manifest import (
    FORMAT,
    MANIFEST,
    SEGMENTS,
    TEMPORARY,
    Entry,
    Manifest,
    chain_of,
    file_name,
    read_manifest,
    refused,
    write_manifest,
)
from dora_pipe.bus.archive.segment import Written, write_segment
from dora_pipe.bus.checks import record_bytes
from dora_pipe.bus.port import Record, TopicPartition
from dora_pipe.core.errors import BusError, LogTruncated, UsageError

SEGMENT_BYTES: Final = 32 * 1024 * 1024
"""A segment with so much in it is full; a reader holds one of them."""

SEGMENT_RECORDS: Final = 200_000

PENDING_MAX: Final = 8
"""Segments that a dead process may have to write again: the manifest is written this seldom."""

LOCK: Final = ".lock"

_NOTHING: Final = Written(records=0, bytes=0, file_bytes=0, sha256="")


class ArchiveWriter:
    """The one writer of an archive; makes the archive if it is not there.

    Example: ``ArchiveWriter(Path("kept/demo"), "demo", {"demo.control": 1})``
    """

    def __init__(
        self,
        directory: Path,
        run: str,
        topics: Mapping[str, int],
        *,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Raises UsageError for the archive of another run, LogTruncated for one without its
        manifest, BusError while another one writes."""
        self.directory = directory
        self._segment_bytes = segment_bytes
        try:
            (directory / SEGMENTS).mkdir(parents=True, exist_ok=True)
            self._lock = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise refused(directory / SEGMENTS, error) from error
        with ExitStack() as unlocking:
            unlocking.callback(os.close, self._lock)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BusError(
                    f"another process writes the archive {directory}",
                    hint="one `dora-pipe archive` at a time; readers need not wait",
                ) from None
            self.manifest = self._begin(run, topics)
            unlocking.pop_all()
        self._pending: list[Entry] = []
        self._ends = {entry.at: entry.end for entry in self.manifest.entries}

    def _begin(self, run: str, topics: Mapping[str, int]) -> Manifest:
        for folder in (self.directory, self.directory / SEGMENTS):
            for left in folder.glob(f"{TEMPORARY}*"):
                left.unlink()
        if (self.directory / MANIFEST).exists():
            found = read_manifest(self.directory)
            if (found.run, found.topics) != (run, dict(topics)):
                raise UsageError(
                    f"{self.directory} is the archive of another run: {found.run}",
                    hint="each run has an archive of its own",
                )
            return found
        if any((self.directory / SEGMENTS).iterdir()):
            raise LogTruncated(
                f"{self.directory} has segments and no {MANIFEST}: it would be written over",
                hint=f"restore {MANIFEST} from a copy, or take another folder",
            )
        cut = {topic: (0,) * count for topic, count in topics.items()}
        made = Manifest(format=FORMAT, run=run, topics=dict(topics), cut=cut)
        write_manifest(self.directory, made)
        return made

    def position(self, tp: TopicPartition) -> int:
        """Where the partition goes on."""
        return self._ends.get(tp, 0)

    def skip(self, tp: TopicPartition, begin: int) -> None:
        """Note that the log had lost everything up to `begin`."""
        start = self.position(tp)
        self._add(tp, start, begin, _NOTHING, deleted=begin - start)

    def seal(
        self,
        tp: TopicPartition,
        records: Iterable[Record],
        end: int,
        is_odd: Callable[[Record], bool] = lambda record: False,
    ) -> None:
        """Seal everything from `position(tp)` to `end`; `records` is all there is of it.

        Raises BusFull, ResourceError, and what `records` and `is_odd` raise; what was sealed
        until then stays.
        """
        source = _Source(tp, iter(records), is_odd)
        while source.more():
            start = self.position(tp)
            path = self.directory / SEGMENTS / file_name(tp, start)
            written = write_segment(path, source.fill(self._segment_bytes))
            full_end = source.last + 1 if source.more() else end
            self._add(tp, start, full_end, written, odd=tuple(source.odd))
        if self.position(tp) < end:
            self._add(tp, self.position(tp), end, _NOTHING)

    def _add(
        self,
        tp: TopicPartition,
        start: int,
        end: int,
        written: Written,
        *,
        deleted: int = 0,
        odd: tuple[int, ...] = (),
    ) -> None:
        entry = Entry(
            topic=tp.topic,
            partition=tp.partition,
            start=start,
            end=end,
            records=written.records,
            bytes=written.bytes,
            file=file_name(tp, start) if written.records else "",
            file_bytes=written.file_bytes,
            sha256=written.sha256,
            deleted=deleted,
            odd=odd,
        )
        chain = chain_of(self.head, entry)
        self._pending.append(msgspec.structs.replace(entry, chain=chain))
        self._ends[tp] = end
        if len(self._pending) >= PENDING_MAX:
            self.flush()

    @property
    def head(self) -> str:
        """The chain's last value."""
        return self._pending[-1].chain if self._pending else self.manifest.head

    def flush(self, cut: Mapping[str, tuple[int, ...]] | None = None) -> None:
        """Write the manifest with everything sealed so far. Raises BusFull, ResourceError."""
        if not self._pending and cut in (None, self.manifest.cut):
            return
        new = msgspec.structs.replace(
            self.manifest,
            entries=(*self.manifest.entries, *self._pending),
            cut=self.manifest.cut if cut is None else dict(cut),
        )
        write_manifest(self.directory, new)
        self.manifest, self._pending = new, []

    def cut(self) -> None:
        """A pass is finished: readers may see everything sealed so far."""
        self.flush(
            {
                topic: tuple(self.position(TopicPartition(topic, one)) for one in range(count))
                for topic, count in self.manifest.topics.items()
            }
        )

    def close(self) -> None:
        """Let another process write; idempotent. What was sealed and not flushed is kept too."""
        if self._lock < 0:
            return
        try:
            self.flush()
        finally:
            os.close(self._lock)
            self._lock = -1


class _Source:
    """Deals one partition's records out to segments; looks one record ahead."""

    def __init__(
        self, tp: TopicPartition, records: Iterator[Record], is_odd: Callable[[Record], bool]
    ) -> None:
        self._tp = tp
        self._records = records
        self._is_odd = is_odd
        self._next = next(records, None)
        self.last = -1
        """Offset of the last record dealt out."""
        self.odd: list[int] = []
        """Of the present segment."""

    def more(self) -> bool:
        """Whether there is another record."""
        return self._next is not None

    def fill(self, bytes_max: int) -> Iterator[Record]:
        """Records for one segment, at least one."""
        self.odd = []
        held_bytes = 0
        count = 0
        while self._next is not None and held_bytes < bytes_max and count < SEGMENT_RECORDS:
            record = self._next
            assert record.at == self._tp and record.offset > self.last
            if self._is_odd(record):
                self.odd.append(record.offset)
            yield record
            held_bytes += record_bytes(record)
            count += 1
            self.last = record.offset
            self._next = next(self._records, None)
