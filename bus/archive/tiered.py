"""One log from two: an archive below, the live log above; decides where they meet.

A partition whose beginning retention has deleted is read from the archive up to its cut, and from
the live log behind it. One that is whole is read from the live log alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Final

from dora_pipe.bus.archive.manifest import CLAIMS
from dora_pipe.bus.archive.reader import ArchiveBus, ArchiveReader
from dora_pipe.bus.base import BusWrapper, PositionReader
from dora_pipe.bus.checks import OpenedHere, check_not_truncated, check_position, is_trimmed
from dora_pipe.bus.claim_check import ClaimBus, ClaimFiles, ClaimStore
from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.core.errors import BusError, InvariantBroken, LogTruncated

POLL_S: Final = 1.0
EMPTY_POLLS_MAX: Final = 30
"""Polls in a row that bring nothing before the first common record is given up."""


class TieredBus(BusWrapper):
    """An archive and the log that it was made of; closes both.

    Example: ``TieredBus(ArchiveBus(Path("kept/demo")), live)``
    """

    def __init__(self, archive: ArchiveBus, live: Bus) -> None:
        """Raises InvariantBroken when the archive is not of this log, BusError."""
        check_same_log(archive, live)
        super().__init__(live)
        self.archive = archive
        self.here = OpenedHere("this log")
        self._joints: dict[TopicPartition, int] = {}

    def joint(self, tp: TopicPartition) -> int:
        """Below it the archive is read. Raises LogTruncated when something lies in neither."""
        if tp not in self._joints:
            begin = self.inner.begin(tp)
            cut = self.archive.end(tp) if tp.topic in self.archive.manifest.topics else 0
            if begin > cut and not is_trimmed(tp.topic):
                raise self._gap(tp, cut, begin)
            self._joints[tp] = cut if begin else 0
        return self._joints[tp]

    def _gap(self, tp: TopicPartition, cut: int, begin: int) -> LogTruncated:
        where = (
            f"{tp.topic}/{tp.partition}: the archive ends at {cut} and the log begins at {begin}"
        )
        if self.archive.sealed(tp) >= begin:
            return LogTruncated(
                f"{where}: what lies between was sealed by a pass that has not ended",
                hint="if it was interrupted: `dora-pipe archive RUN --to DIR` goes on where it was",
            )
        return LogTruncated(
            f"{where}: the records from offset {cut} on are in neither",
            hint="retention was shorter than the time between two archivings; is there "
            "another archive?",
        )

    def rejoin(self) -> None:
        """Look again where archive and log meet: both may have moved."""
        self.archive.refresh()
        self._joints.clear()

    def begin(self, tp: TopicPartition) -> int:
        """The first position: where the archive begins, if the log does not."""
        return 0 if self.joint(tp) else self.inner.begin(tp)

    def reader(self, positions: Mapping[TopicPartition, int]) -> TieredReader:
        self.here.check()
        for tp, position in positions.items():
            check_position(tp, position)
            check_not_truncated(tp, self.joint(tp), self.inner.end(tp))
        return TieredReader(self, positions)

    def close(self) -> None:
        self.here.close()
        self.archive.close()
        self.inner.close()


class TieredReader(PositionReader):
    """Reads what the archive has first, then the live log.

    While a partition is below its joint, only such partitions are read; the live reader is opened
    when none is, so that it never fetches what will be read later.
    """

    def __init__(self, bus: TieredBus, positions: Mapping[TopicPartition, int]) -> None:
        super().__init__(positions, bus.here.check)
        self._bus = bus
        self._old: ArchiveReader | None = None
        self._live: Reader | None = None

    def poll(
        self, *, timeout_s: float, records_max: int = 500, bytes_max: int = 32 * 1024 * 1024
    ) -> list[Record]:
        """Records from the present positions on; waits only for the live log."""
        self._check_open()
        found = self._take_old(records_max, bytes_max)
        if found:
            return found
        try:
            return self._live_reader().poll(
                timeout_s=timeout_s, records_max=records_max, bytes_max=bytes_max
            )
        except LogTruncated:
            if not self._fall_back():
                raise
        return self._take_old(records_max, bytes_max)

    def _take_old(self, records_max: int, bytes_max: int) -> list[Record]:
        """What the archive has of what is wanted next."""
        while below := self._below():
            old = self._old_reader(below)
            found = old.take(records_max, bytes_max)
            for tp in below:
                self._positions[tp] = old.position(tp)
            if found:
                return found
        self._drop_old()
        return []

    def _live_reader(self) -> Reader:
        if self._live is None:
            self._live = self._bus.inner.reader(self._positions)
        return self._live

    def _fall_back(self) -> bool:
        """Whether retention overtook the live reader, and the archive has what it deleted."""
        self._leave_live()
        self._bus.rejoin()
        return bool(self._below())

    def _leave_live(self) -> None:
        if self._live is not None:
            self._positions = {each: self._live.position(each) for each in self._positions}
            self._live.close()
            self._live = None

    def _below(self) -> list[TopicPartition]:
        """Partitions that are in the archive still."""
        if self._live is not None:
            return []
        return [tp for tp, position in self._positions.items() if position < self._bus.joint(tp)]

    def _old_reader(self, below: Sequence[TopicPartition]) -> ArchiveReader:
        if self._old is None:
            self._old = self._bus.archive.reader({tp: self._positions[tp] for tp in below})
        return self._old

    def _drop_old(self) -> None:
        if self._old is not None:
            self._old.close()
            self._old = None

    def position(self, tp: TopicPartition) -> int:
        self._check_assigned(tp)
        return self._positions[tp] if self._live is None else self._live.position(tp)

    def held_back(self) -> list[TopicPartition]:
        """As the live log's reader knows it."""
        self._check_open()
        return [] if self._live is None else self._live.held_back()

    def seek(self, tp: TopicPartition, position: int) -> None:
        self._check_assigned(tp)
        check_position(tp, position)
        if self._live is not None and position >= self._bus.joint(tp):
            self._live.seek(tp, position)
            return
        self._leave_live()
        self._positions[tp] = position
        self._drop_old()

    def close(self) -> None:
        super().close()
        self._drop_old()
        if self._live is not None:
            self._live.close()
            self._live = None


class TieredClaims(ClaimStore):
    """Claimed values of a log and of its archive."""

    def __init__(self, live: ClaimStore, archived: ClaimStore) -> None:
        self._live = live
        self._archived = archived

    def write(self, digest: str, value: bytes) -> None:
        """Beside the live log."""
        self._live.write(digest, value)

    def read(self, digest: str, size_bytes: int) -> bytes | None:
        """From wherever it is."""
        found = self._live.read(digest, size_bytes)
        return self._archived.read(digest, size_bytes) if found is None else found


def tiered(live: Bus, directory: Path) -> Bus:
    """A log with its archive below it, large values included. Raises as `TieredBus`."""
    archive = ArchiveBus(directory)
    if not isinstance(live, ClaimBus):
        return TieredBus(archive, live)
    claims = TieredClaims(live.store, ClaimFiles(directory / CLAIMS))
    return ClaimBus(TieredBus(archive, live.inner), claims)


def check_same_log(archive: ArchiveBus, live: Bus) -> None:
    """Compare the first record that both have, in the first partition of every topic that is kept.

    Raises InvariantBroken when they differ: another run of the same name, or a changed archive.
    """
    for topic in itertools.filterfalse(is_trimmed, archive.topics()):
        tp = TopicPartition(topic, 0)
        begin = live.begin(tp)
        ends = min(archive.end(tp), live.end(tp))
        ours, theirs = (_first(bus, tp, begin, ends) for bus in (archive, live))
        if ours != theirs:
            at = (ours or theirs or _nothing(tp, begin)).offset
            raise InvariantBroken(
                f"{archive.path} is not an archive of this log: {topic}/0 differs at offset {at}",
                hint="another run of the same name, or one of the two was changed",
            )


def _first(bus: Bus, tp: TopicPartition, begin: int, end: int) -> Record | None:
    """The first record of [begin, end), None where there is none."""
    if begin >= end:
        return None
    with closing(bus.reader({tp: begin})) as reader:
        for _ in range(EMPTY_POLLS_MAX):
            if reader.position(tp) >= end:
                return None
            for record in reader.poll(timeout_s=POLL_S, records_max=1):
                return record if record.offset < end else None
    raise BusError(f"{tp.topic} gives no records before its end")


def _nothing(tp: TopicPartition, offset: int) -> Record:
    return Record(topic=tp.topic, partition=tp.partition, offset=offset, key=b"", value=b"")
