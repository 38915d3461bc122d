"""Port that reads logged records of a request or group, one record per poll."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from dora_pipe.bus.bus import Bus, Reader
from dora_pipe.bus.logged import record_digest
from dora_pipe.core.errors import BusError, SchemaError, reason
from dora_pipe.core.loop.effect_runner import attempt
from dora_pipe.core.loop.retry import FINAL_ERRORS
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Record, TopicPartition
from dora_pipe.core.system.clock import Clock
from dora_pipe.producers.worker.effects import (
    FetchGroup,
    FetchProgress,
    GroupFetched,
    ProgressFetched,
    RecordEffect,
    RecordEvent,
)
from dora_pipe.schemas.control import Resume, TakenTrajectory
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory

CHAIN_MAX: Final = 4096

READ_TIMEOUT_NS: Final = 10_000_000_000


@dataclass(slots=True, kw_only=True)
class _Fetch:
    effect: RecordEffect
    partition: TopicPartition
    offset: int
    until_ns: int
    decoded: list[Any] = field(default_factory=list)
    reader: Reader | None = None

    def read(self, bus: Bus) -> Record | None:
        """Return the first record from the offset, if available."""
        try:
            if self.reader is None:
                self.reader = bus.reader({self.partition: self.offset})
            self.reader.seek(self.partition, self.offset)
            records = self.reader.poll(timeout_s=0.0, records_max=1)
        except FINAL_ERRORS:
            raise
        except BusError:
            return None
        return records[0] if records else None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


class RecordPort:
    """Reads chains of progress records back to their start, and verifies the records of groups.

    Events of unreadable or invalid records have the reason in `why`.
    """

    def __init__(self, bus: Bus, topics: Topics, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topics = topics
        self._meter = meter
        self._clock = clock
        self._fetches: deque[_Fetch] = deque()

    def start(self, effect: RecordEffect) -> None:
        first: Resume | TakenTrajectory
        if isinstance(effect, FetchProgress):
            topic, first = self._topics.progress, effect.resume
        else:
            topic, first = self._topics.trajectories, effect.trajectories[0]
        self._fetches.append(
            _Fetch(
                effect=effect,
                partition=TopicPartition(topic, first.partition),
                offset=first.offset,
                until_ns=self._clock.now_ns() + READ_TIMEOUT_NS,
            )
        )

    def poll(self) -> list[RecordEvent]:
        if not self._fetches:
            return []
        fetch = self._fetches.popleft()
        name = type(fetch.effect).__name__
        events = list(attempt(name, partial(self._next, fetch), partial(_failed, fetch)))
        if events:
            fetch.close()
        else:
            self._fetches.append(fetch)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._fetches)

    def close(self) -> None:
        while self._fetches:
            self._fetches.popleft().close()

    def _next(self, fetch: _Fetch) -> Iterator[RecordEvent]:
        with self._meter.spend("bus"):
            record = fetch.read(self._bus)
        if record is None:
            if self._clock.now_ns() >= fetch.until_ns:
                yield _fetched(fetch, "timed out reading it")
            return
        if record.offset != fetch.offset:
            yield _fetched(fetch, f"there is no record at offset {fetch.offset}")
            return
        try:
            with self._meter.spend("codec"):
                if isinstance(fetch.effect, FetchProgress):
                    complete = _add_progress(fetch, record)
                else:
                    complete = self._add_trajectory(fetch, fetch.effect, record)
        except SchemaError as error:
            yield _fetched(fetch, f"the record at offset {fetch.offset}: {error.message}")
            return
        if complete:
            yield _fetched(fetch)

    def _add_trajectory(self, fetch: _Fetch, effect: FetchGroup, record: Record) -> bool:
        """Verify a record; return whether it was the last. Raises SchemaError."""
        taken = effect.trajectories[len(fetch.decoded)]
        if record_digest(record) != taken.sha256:
            raise SchemaError(f"{taken.trajectory}: its bytes differ from the logged ones")
        trajectory = decode_trajectory(record.value)
        meta = trajectory.meta
        identity = (trajectory.trajectory, meta.attempt, meta.incarnation, meta.run)
        if identity != (taken.trajectory, taken.attempt, taken.incarnation, self._topics.run):
            raise SchemaError(
                f"{taken.trajectory}: the record there is {trajectory.trajectory}, attempt"
                f" {meta.attempt}, of {meta.run}"
            )
        if trajectory.reward is None:
            raise SchemaError(f"{taken.trajectory}: it has no valid reward")
        fetch.decoded.append(trajectory)
        if len(fetch.decoded) == len(effect.trajectories):
            return True
        fetch.offset = effect.trajectories[len(fetch.decoded)].offset
        return False


def _add_progress(fetch: _Fetch, record: Record) -> bool:
    """Add a chunk; return whether it was the chain's first. Raises SchemaError."""
    chunk = decode_any_progress(record.value)
    fetch.decoded.append(chunk)
    if chunk.previous < 0:
        return True
    if chunk.previous >= fetch.offset or len(fetch.decoded) >= CHAIN_MAX:
        raise SchemaError("it names no earlier one")
    fetch.offset = chunk.previous
    return False


def _fetched(fetch: _Fetch, why: str = "") -> RecordEvent:
    request, decoded = fetch.effect.request, () if why else fetch.decoded
    if isinstance(fetch.effect, FetchProgress):
        return ProgressFetched(request=request, chunks=decoded[::-1], why=why)
    return GroupFetched(request=request, trajectories=decoded, why=why)


def _failed(fetch: _Fetch, error: Exception) -> list[RecordEvent]:
    """Raises BusError: those of a read were handled before."""
    if isinstance(error, BusError):
        raise error
    return [_fetched(fetch, reason(error))]
