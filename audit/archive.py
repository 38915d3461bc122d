"""Archives a run: reads its log from where the archive ends, checks it, seals it; decides the cut.

The cut is made so that an audit of the archive sees what an audit of the log would have seen at
some moment, although the run goes on: ends are taken in an order in which each covers what the
next one names (see `reading.Horizon`). Trajectories go as far as they went before the decisions
were looked at, or as far as the facts that those decisions fold name them; control as far as those
decisions fold it, or as it went before them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dora_pipe.audit.reading import ends_of, record_at, records_of
from dora_pipe.bus.archive.manifest import CLAIMS
from dora_pipe.bus.archive.reader import ArchiveBus
from dora_pipe.bus.archive.tiered import check_same_log
from dora_pipe.bus.archive.writer import SEGMENT_BYTES, ArchiveWriter
from dora_pipe.bus.checks import check_not_truncated
from dora_pipe.bus.claim_check import CLAIM, ClaimBus, ClaimFiles, claimed_bytes
from dora_pipe.bus.port import Bus, Record, TopicPartition
from dora_pipe.core.errors import BusError, LogTruncated, SchemaError
from dora_pipe.schemas.control import TrajectoriesLogged, decode_control
from dora_pipe.schemas.rounds import decode_round
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.wire import sha256_hex

_STOP: Final = b'"kind":"stop-run"'
_LOGGED: Final = b'"trajectories-logged"'
_HEX: Final = re.compile(rb"[0-9a-f]{64}")


@dataclass(slots=True, kw_only=True)
class Pass:
    """What one pass added."""

    segments: int = 0
    records: int = 0
    bytes: int = 0
    """Of keys, headers and values."""
    head: str = ""
    """The chain's last value afterwards."""
    notes: list[str] = field(default_factory=list)
    """What is not as it should be and was archived as it is, one line each."""


class Archiver:
    """Lets the archive of one run grow, pass by pass. Example: ``Archiver(bus, topics, dir)``"""

    def __init__(
        self, bus: Bus, topics: Topics, directory: Path, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Raises UsageError, BusError, InvariantBroken when the archive is not of this log."""
        self._bus = bus.inner if isinstance(bus, ClaimBus) else bus
        self._claims = bus.store if isinstance(bus, ClaimBus) else None
        self._kept = ClaimFiles(directory / CLAIMS)
        self._topics = topics
        counts = {topic: self._bus.partitions(topic) for topic in topics.all()}
        self._writer = ArchiveWriter(directory, topics.run, counts, segment_bytes=segment_bytes)
        with ExitStack() as closing_it:
            closing_it.callback(self._writer.close)
            with closing(ArchiveBus(directory)) as archive:
                check_same_log(archive, self._bus)
                self._stopped = self.finished = self._is_finished(archive)
                """The run's last decision is in the archive; finished: nothing is held back."""
            closing_it.pop_all()
        self._pass = Pass()

    def _is_finished(self, archive: ArchiveBus) -> bool:
        """From what earlier passes archived."""
        decisions = TopicPartition(self._topics.decisions, 0)
        rounds = records_of(archive, {decisions: archive.end(decisions)})
        return any(_STOP in record.value for record in rounds)

    def once(self) -> Pass:
        """Archive everything up to a cut that lies not before what is there now.

        Raises LogTruncated when the log has lost what was not archived yet, BusError, BusFull,
        ResourceError; what was sealed until then stays.
        """
        self._pass = Pass()
        sealed = len(self._writer.manifest.entries)
        topics, bus = self._topics, self._bus
        control, decisions = TopicPartition(topics.control, 0), TopicPartition(topics.decisions, 0)
        before = ends_of(bus, topics.trajectories)
        control_before = bus.end(control)
        rounds = _Rounds(self._new(decisions, bus.end(decisions)))
        self._seal(decisions, rounds.end, rounds.records())
        folded = min(rounds.control_next, bus.end(control))
        facts = _Facts(self._new(control, max(control_before, folded)))
        self._seal(control, facts.end, facts.records())
        for tp, end in ends_of(bus, topics.trajectories).items():
            self._seal_plain(tp, max(before[tp], min(facts.named.get(tp.partition, 0), end)))
        for topic in (topics.progress, topics.metrics, topics.dead_letters):
            for tp, end in ends_of(bus, topic).items():
                self._seal_plain(tp, end)
        self._writer.cut()
        self._stopped = self._stopped or rounds.stopped
        self.finished = self._stopped and not self._is_held_back()
        self._pass.segments = len(self._writer.manifest.entries) - sealed
        self._pass.head = self._writer.head
        return self._pass

    def _is_held_back(self) -> bool:
        """Whether the log has acknowledged records that nobody can read yet; noted."""
        held = [
            tp
            for topic in self._topics.all()
            for tp, end in ends_of(self._bus, topic).items()
            if end < self._bus.written_end(tp)
        ]
        self._pass.notes += [
            f"{tp.topic}/{tp.partition}: its last records cannot be read yet, because an append "
            "before them is open; archive once more"
            for tp in held
        ]
        return bool(held)

    def _seal_plain(self, tp: TopicPartition, end: int) -> None:
        new = self._new(tp, end)
        self._seal(tp, new.end, new.records)

    def _new(self, tp: TopicPartition, end: int) -> _New:
        """What the archive does not have yet, up to `end`."""
        start, begin = self._writer.position(tp), self._bus.begin(tp)
        check_not_truncated(tp, start, self._bus.end(tp))
        if start < begin:
            if tp.topic not in (self._topics.metrics, self._topics.progress):
                raise LogTruncated(
                    f"{tp.topic}/{tp.partition} begins at {begin}: the records from offset {start} "
                    "on were deleted before they were archived",
                    hint="go on with another archive that holds them, if there is one; what this "
                    f"one holds stays readable: dora-pipe audit {self._writer.directory}",
                )
            self._pass.notes.append(
                f"{tp.topic}/{tp.partition}: offsets {start} to {begin - 1} were deleted before "
                "they were archived"
            )
            self._writer.skip(tp, begin)
            start = begin
        end = max(start, end)
        found = records_of(self._bus, {tp: end}, start=start) if end > start else iter(())
        return _New(end=end, records=found)

    def _seal(self, tp: TopicPartition, end: int, records: Iterator[Record]) -> None:
        self._writer.seal(tp, self._counted(records), end, self._is_odd)

    def _counted(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self._pass.records += 1
            self._pass.bytes += len(record.key) + len(record.value)
            yield record

    def _is_odd(self, record: Record) -> bool:
        """Whether the log itself holds other bytes than a record's headers name.

        Raises BusError if only this reading of it did.
        """
        headers = dict(record.headers)
        where = f"{record.topic}/{record.partition}@{record.offset}"
        if lost := self._keep_claim(record):
            self._pass.notes.append(f"{where}: {lost}")
            return True
        named = headers.get("sha256", b"")
        if not _HEX.fullmatch(named) or claimed_bytes(record):
            return False
        if sha256_hex(record.value).encode() == named:
            return False
        if record_at(self._bus, record.at, record.offset) != record:
            raise BusError(f"{where}: two readings gave different bytes; nothing was sealed")
        self._pass.notes.append(f"{where}: its bytes are not those that its headers name (sha256)")
        return True

    def _keep_claim(self, record: Record) -> str:
        """Copy the value that a record claims; why that cannot be, empty if nothing is wrong."""
        size_bytes = claimed_bytes(record)
        if not size_bytes:
            return ""
        digest = dict(record.headers)[CLAIM].decode()
        value = None if self._claims is None else self._claims.read(digest, size_bytes)
        if value is None or sha256_hex(value) != digest:
            return f"the value that it claims is not there: {digest}"
        self._kept.write(digest, value)
        return ""

    def close(self) -> None:
        """Let another process write the archive; idempotent."""
        self._writer.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _New:
    """Records of one partition that are not archived yet, up to `end`."""

    end: int
    records: Iterator[Record]


class _Rounds:
    """Decisions on their way into the archive; remembers how far the last one folds control."""

    def __init__(self, new: _New) -> None:
        self.end = new.end
        self.stopped = False
        self._new = new
        self._last = b""

    def records(self) -> Iterator[Record]:
        """Pass them on."""
        for record in self._new.records:
            self._last = record.value
            self.stopped = self.stopped or _STOP in record.value
            yield record

    @property
    def control_next(self) -> int:
        """Of the last round; 0 if there was none, or it cannot be read."""
        with suppress(SchemaError):
            return decode_round(self._last).control_next if self._last else 0
        return 0


class _Facts:
    """Control on its way into the archive; remembers how far it names trajectories."""

    def __init__(self, new: _New) -> None:
        self.end = new.end
        self.named: dict[int, int] = {}
        """Position behind the last named record, by partition."""
        self._new = new

    def records(self) -> Iterator[Record]:
        """Pass them on."""
        for record in self._new.records:
            if _LOGGED in record.value:
                with suppress(SchemaError):
                    self._note(decode_control(record.value))
            yield record

    def _note(self, fact: object) -> None:
        if isinstance(fact, TrajectoriesLogged):
            for one in fact.facts():
                named = max(self.named.get(one.partition, 0), one.offset + 1)
                self.named[one.partition] = named
