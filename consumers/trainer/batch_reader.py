"""Reader of trajectories with a bounded cache.

Evicts the latest deadline first; reads evicted entries again from the log.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from dora_pipe.bus.blobs import lost_blob
from dora_pipe.bus.bus import Bus
from dora_pipe.bus.checks import check_reaches, record_bytes
from dora_pipe.bus.logged import PlaceReader, RecordPlace, record_digest
from dora_pipe.consumers.learners.learner import LoggedAt, TrainBatch, TrainGroup
from dora_pipe.consumers.trainer.commits import smallest_offsets
from dora_pipe.core.errors import InvariantBroken, SchemaError
from dora_pipe.core.loop.retry import DELIVERY_TIMEOUT_S, retry_bus
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Record, TopicPartition, dead_letter_of
from dora_pipe.core.system.clock import Clock
from dora_pipe.schemas.batch import parts_of
from dora_pipe.schemas.control import StepCommitted, TakenGroup
from dora_pipe.schemas.dead_letter import DeadLetter
from dora_pipe.schemas.headers import parse_headers
from dora_pipe.schemas.identity import parse_trajectory_id
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Headers, Trajectory
from dora_pipe.schemas.trajectory_codec import view_trajectory

LOG = logging.getLogger(__name__)
RECORDS_MAX: Final = 8192
BYTES_MAX: Final = 256 * 1024 * 1024
"""Default cache bounds: keys, headers and values as logged."""

POLL_RECORDS_MAX: Final = 500
SEEK_GAP: Final = 64
"""Offsets this close are read together."""

STALE_MIN: Final = 1024
"""Stale heap entries tolerated before a rebuild."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedRecord:
    """A record, or the reason why it is unusable."""

    record: Record | None = None
    headers: Headers | None = None
    sha256: str = ""
    error: SchemaError | None = None

    @property
    def why(self) -> str:
        return "" if self.error is None else f"unreadable: {self.error.message}"


class BatchReader:
    """Reader of the trajectories topic from `starts` (by partition); not thread-safe."""

    def __init__(
        self,
        bus: Bus,
        topic: str,
        *,
        run: str,
        starts: Mapping[int, int],
        clock: Clock,
        meter: Meter | None = None,
        records_max: int = RECORDS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self.meter = meter or Meter()
        self.view = view_trajectory
        self._bus = bus
        self._topic = topic
        self._run = run
        self._clock = clock
        self._records_max = records_max
        self._bytes_max = bytes_max
        self._partitions = retry_bus("reading", lambda: bus.partitions(topic), clock)
        partitions = [TopicPartition(topic, number) for number in range(self._partitions)]
        # Retention may have deleted unneeded records.
        begins = retry_bus("reading", lambda: [bus.begin(tp) for tp in partitions], clock)
        positions = {
            tp: max(starts.get(tp.partition, 0), begin)
            for tp, begin in zip(partitions, begins, strict=True)
        }
        self._reader = retry_bus("reading", lambda: bus.reader(positions), clock)
        self._places = PlaceReader(
            bus, topic, gap=SEEK_GAP, attempt=lambda call: retry_bus("reading", call, clock)
        )
        self._cache: dict[RecordPlace, FetchedRecord] = {}
        self._latest: list[tuple[int, int, int]] = []  # heap of (-deadline, -offset, partition)
        self._deadline_min = 0
        self._dead_letters: list[DeadLetter] = []
        self._stuck: tuple[TopicPartition, int] | None = None
        """Partition that `find` waits for, and its position."""
        self._stuck_since_ns = 0
        self.bytes = 0
        self.waits_for = ""
        """Place that the last `find` did not reach, in words."""
        self.seeks = 0

    @property
    def records(self) -> int:
        return len(self._cache)

    def read_ahead(self, *, timeout_s: float) -> int:
        """Read available records, waiting up to `timeout_s`; return their number. Raises BusError,
        LogTruncated."""
        with self.meter.spend("bus"):
            records = retry_bus(
                "reading trajectories",
                lambda: self._reader.poll(timeout_s=timeout_s, records_max=POLL_RECORDS_MAX),
                self._clock,
            )
        with self.meter.spend("codec"):
            for record in records:
                self._pass(record)
        return len(records)

    def find(
        self, places: Sequence[RecordPlace], *, timeout_s: float
    ) -> dict[RecordPlace, FetchedRecord] | None:
        """Return the records at these places; None until all are reached. Raises LogTruncated for a
        place after the log's end, after `DELIVERY_TIMEOUT_S` without records."""
        behind = self._behind(places)
        if behind is not None:
            self.read_ahead(timeout_s=timeout_s)
            behind = self._behind(places)
            self._wait_on(behind)
        self.waits_for = self._words(behind)
        if behind is not None:
            return None
        records = {
            position: self._cache[position] for position in places if position in self._cache
        }
        records |= self._seek([position for position in places if position not in records])
        return records

    def drop(self, places: Iterable[RecordPlace]) -> None:
        """Evict records; they can still be read again."""
        for position in places:
            self._forget(position)

    def drop_before(self, deadline: int) -> None:
        """Evict records with an earlier deadline, and cache no more of them."""
        self._deadline_min = deadline
        overdue = [
            position
            for position, fetched in self._cache.items()
            if fetched.headers is not None and fetched.headers.deadline < deadline
        ]
        self.drop(overdue)

    def dead_letters(self) -> list[DeadLetter]:
        """Return and clear the dead letters of unreadable records."""
        letters, self._dead_letters = self._dead_letters, []
        return letters

    def dead_letter(self, record: Record, error: SchemaError) -> DeadLetter:
        return dead_letter_of(record, error, self._clock.wall_ns())

    def close(self) -> None:
        self._reader.close()
        self._places.close()

    def _behind(self, places: Iterable[RecordPlace]) -> RecordPlace | None:
        for position in places:
            partition = TopicPartition(self._topic, position.partition)
            exists = 0 <= position.partition < self._partitions
            if exists and self._reader.position(partition) <= position.offset:
                return position
        return None

    def _words(self, behind: RecordPlace | None) -> str:
        if behind is None:
            return ""
        position = self._reader.position(TopicPartition(self._topic, behind.partition))
        return f"partition {behind.partition} is read up to {position}, not yet {behind.offset}"

    def _wait_on(self, behind: RecordPlace | None) -> None:
        if behind is None:
            self._stuck = None
            return
        partition = TopicPartition(self._topic, behind.partition)
        now_ns, stuck = self._clock.now_ns(), (partition, self._reader.position(partition))
        if stuck != self._stuck:
            self._stuck, self._stuck_since_ns = stuck, now_ns
        elif now_ns - self._stuck_since_ns > DELIVERY_TIMEOUT_S * 1e9:
            end = retry_bus(
                "reading the log's end", lambda: self._bus.written_end(partition), self._clock
            )
            check_reaches(partition, behind.offset, end)
            self._stuck_since_ns = now_ns
            LOG.warning(
                "%s/%d returned no record for %.0f s after offset %d (end: %d): a quota, a slow "
                "link or an open transaction delays it",
                *partition,
                DELIVERY_TIMEOUT_S,
                stuck[1],
                end,
            )

    def _pass(self, record: Record) -> None:
        fetched = self._look_at(record)
        if fetched.headers is None:
            assert fetched.error is not None
            where = f"{record.topic}/{record.partition} offset {record.offset}"
            LOG.warning("unreadable record at %s: %s", where, fetched.error.message)
            self._dead_letters.append(self.dead_letter(record, fetched.error))
            return
        trains = fetched.headers.trajectory.startswith("g")
        if trains and fetched.headers.deadline >= self._deadline_min:
            self._keep(RecordPlace(record.partition, record.offset), fetched)

    def _look_at(self, record: Record) -> FetchedRecord:
        try:
            headers = parse_headers(record.headers)
            parse_trajectory_id(headers.trajectory)
            if lost := lost_blob(record):
                raise SchemaError(lost)
            sha256 = record_digest(record)
            if headers.run != self._run:
                raise SchemaError(f"a record of run {headers.run}", path="$.headers.run")
            if headers.sha256 != sha256:
                raise SchemaError("not the sha256 of the value", path="$.headers.sha256")
        except SchemaError as error:
            return FetchedRecord(record=record, error=error)
        return FetchedRecord(record=record, headers=headers, sha256=sha256)

    def _keep(self, position: RecordPlace, fetched: FetchedRecord) -> None:
        assert fetched.record is not None
        assert fetched.headers is not None
        self._forget(position)
        self._cache[position] = fetched
        self.bytes += record_bytes(fetched.record)
        heapq.heappush(self._latest, _lateness(position, fetched))
        while self.bytes > self._bytes_max or len(self._cache) > self._records_max:
            _, offset, partition = heapq.heappop(self._latest)
            self._forget(RecordPlace(partition, -offset))

    def _forget(self, position: RecordPlace) -> None:
        fetched = self._cache.pop(position, None)
        if fetched is not None and fetched.record is not None:
            self.bytes -= record_bytes(fetched.record)
        if len(self._latest) > 2 * len(self._cache) + STALE_MIN:
            self._latest = [
                _lateness(position, fetched) for position, fetched in self._cache.items()
            ]
            heapq.heapify(self._latest)

    def _seek(self, places: Sequence[RecordPlace]) -> dict[RecordPlace, FetchedRecord]:
        nothing = FetchedRecord(error=SchemaError("the log has no record at its offset"))
        fetched = dict.fromkeys(places, nothing)
        existing = [position for position in places if 0 <= position.partition < self._partitions]
        with self.meter.spend("bus"):
            records = list(self._places.read(existing))
        for record in records:
            position = RecordPlace(record.partition, record.offset)
            if position in fetched:
                fetched[position] = self._look_at(record)
                self.seeks += 1
        return fetched


def _lateness(position: RecordPlace, fetched: FetchedRecord) -> tuple[int, int, int]:
    assert fetched.headers is not None
    return (-fetched.headers.deadline, -position.offset, position.partition)


WAIT_S: Final = 0.05


def committed_batch(
    reader: BatchReader, commit: StepCommitted, *, strict: bool
) -> Generator[None, None, TrainBatch]:
    """Return a commit's batch from the log. Raises InvariantBroken if it differs."""
    records = yield from find(reader, commit.groups)
    trajectories: dict[str, Trajectory] = {}
    sha256s: dict[str, str] = {}
    for taken in (trajectory for group in commit.groups for trajectory in group.trajectories):
        fetched = records[RecordPlace(taken.partition, taken.offset)]
        who = f"step {commit.step}: trajectory {taken.trajectory}"
        if fetched.record is None or (strict and fetched.why):
            raise InvariantBroken(f"{who}: {fetched.why}")
        if strict and fetched.sha256 != taken.sha256:
            raise InvariantBroken(f"{who} differs from the trained record")
        try:
            with reader.meter.spend("codec"):
                trajectories[taken.trajectory] = reader.view(fetched.record.value)
        except SchemaError as error:
            why = lost_blob(fetched.record) or error.message
            raise InvariantBroken(f"{who} cannot be read: {why}") from error
        sha256s[taken.trajectory] = record_digest(fetched.record)
    return batch_of(commit.step, commit.groups, trajectories, sha256s, parts=commit.parts)


def batch_of_commit(bus: Bus, topics: Topics, commit: StepCommitted, *, clock: Clock) -> TrainBatch:
    """Return a commit's batch. Raises InvariantBroken if bytes changed, BusError."""
    starts = smallest_offsets(commit)
    reader = BatchReader(bus, topics.trajectories, run=topics.run, starts=starts, clock=clock)
    try:
        return read_batch(reader, commit, strict=True)
    finally:
        reader.close()


def read_batch(reader: BatchReader, commit: StepCommitted, *, strict: bool) -> TrainBatch:
    """Run `committed_batch` to its end, blocking."""
    waiting = committed_batch(reader, commit, strict=strict)
    while True:
        try:
            next(waiting)
        except StopIteration as done:
            batch: TrainBatch = done.value
            return batch


def find(
    reader: BatchReader, groups: Sequence[TakenGroup]
) -> Generator[None, None, dict[RecordPlace, FetchedRecord]]:
    """Return the records of a batch; they stay cached."""
    places = places_of(groups)
    while (records := reader.find(places, timeout_s=WAIT_S)) is None:
        yield None
    return records


def places_of(groups: Sequence[TakenGroup]) -> list[RecordPlace]:
    return [
        RecordPlace(trajectory.partition, trajectory.offset)
        for group in groups
        for trajectory in group.trajectories
    ]


def batch_of(
    step: int,
    groups: Sequence[TakenGroup],
    trajectories: Mapping[str, Trajectory],
    sha256s: Mapping[str, str] | None = None,
    *,
    parts: Sequence[int] = (),
) -> TrainBatch:
    """Return a batch in the learner's order; `sha256s` are the logged digests, if they may have
    changed."""
    ordered = [
        _group(taken_group, trajectories, sha256s)
        for part in parts_of(groups, parts)
        for taken_group in sorted(part, key=lambda group: group.group)
    ]
    return TrainBatch(step=step, groups=ordered, parts=parts)


def _group(
    group: TakenGroup, trajectories: Mapping[str, Trajectory], sha256s: Mapping[str, str] | None
) -> TrainGroup:
    samples = sorted(group.trajectories, key=lambda taken: taken.trajectory)
    return TrainGroup(
        group=group.group,
        version=group.version,
        trajectories=[
            with_reward(trajectories[taken.trajectory], group.rewards) for taken in samples
        ],
        places=[
            LoggedAt(
                partition=taken.partition,
                offset=taken.offset,
                sha256=taken.sha256 if sha256s is None else sha256s[taken.trajectory],
            )
            for taken in samples
        ],
    )


def with_reward(trajectory: Trajectory, rewards: Mapping[str, float]) -> Trajectory:
    """Return the trajectory with its group reward, if any."""
    if trajectory.trajectory not in rewards:
        return trajectory
    return replace(trajectory, reward=rewards[trajectory.trajectory])
