"""Ports that read records of requests and groups from the log."""

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
)
from dora_pipe.schemas.control import TakenTrajectory
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.trajectory_codec import AnyProgress, decode_any_progress, decode_trajectory

CHAIN_MAX: Final = 4096

READ_TIMEOUT_NS: Final = 10_000_000_000


@dataclass(slots=True, kw_only=True)
class Reading:
    """Records of one partition, read one by one for a request."""

    request: str
    tp: TopicPartition
    wanted: int
    until_ns: int
    reader: Reader | None = None

    def read(self, bus: Bus) -> Record | None:
        """Return the first record from the wanted offset, if available."""
        try:
            if self.reader is None:
                self.reader = bus.reader({self.tp: self.wanted})
            self.reader.seek(self.tp, self.wanted)
            records = self.reader.poll(timeout_s=0.0, records_max=1)
        except FINAL_ERRORS:
            raise
        except BusError:
            return None
        return records[0] if records else None

    def close(self) -> None:
        if self.reader is not None:
            self.reader.close()


@dataclass(slots=True, kw_only=True)
class _Chain(Reading):
    found: list[AnyProgress] = field(default_factory=list)


class ProgressPort:
    """Reads chains of progress records back to their start; a broken chain is empty."""

    effects: tuple[type, ...] = (FetchProgress,)

    def __init__(self, bus: Bus, topic: str, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._meter = meter
        self._clock = clock
        self._chains: deque[_Chain] = deque()

    def start(self, effect: FetchProgress) -> None:
        chain = _Chain(
            request=effect.request,
            tp=TopicPartition(self._topic, effect.resume.partition),
            wanted=effect.resume.offset,
            until_ns=self._clock.now_ns() + READ_TIMEOUT_NS,
        )
        self._chains.append(chain)

    def poll(self) -> list[Any]:
        if not self._chains:
            return []
        chain = self._chains.popleft()
        events = list(
            attempt("FetchProgress", partial(self._next, chain), partial(_lost_chain, chain))
        )
        if events:
            chain.close()
        else:
            self._chains.append(chain)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._chains)

    def close(self) -> None:
        while self._chains:
            self._chains.popleft().close()

    def _next(self, chain: _Chain) -> Iterator[ProgressFetched]:
        with self._meter.spend("bus"):
            record = chain.read(self._bus)
        if record is None:
            if self._clock.now_ns() >= chain.until_ns:
                yield _broken_chain(chain, "timed out reading it")
        elif record.offset != chain.wanted:
            yield _broken_chain(chain, f"there is no record at offset {chain.wanted}")
        else:
            yield from self._add(chain, record)

    def _add(self, chain: _Chain, record: Record) -> Iterator[ProgressFetched]:
        try:
            with self._meter.spend("codec"):
                chunk = decode_any_progress(record.value)
        except SchemaError as error:
            yield _broken_chain(chain, f"the record at offset {record.offset}: {error.message}")
            return
        chain.found.append(chunk)
        if chunk.previous < 0:
            yield ProgressFetched(request=chain.request, chunks=chain.found[::-1])
        elif chunk.previous >= chain.wanted or len(chain.found) >= CHAIN_MAX:
            yield _broken_chain(chain, f"the record at offset {record.offset} names no earlier one")
        chain.wanted = chunk.previous


def _broken_chain(chain: _Chain, why: str) -> ProgressFetched:
    return ProgressFetched(request=chain.request, chunks=(), why=why)


def _lost_chain(chain: _Chain, error: Exception) -> list[ProgressFetched]:
    """Raises BusError: those of a chain were handled before."""
    if isinstance(error, BusError):
        raise error
    return [_broken_chain(chain, reason(error))]


@dataclass(slots=True, kw_only=True)
class _Group(Reading):
    left: deque[TakenTrajectory]
    found: list[Trajectory] = field(default_factory=list)


class GroupPort:
    """Reads and verifies the records of groups."""

    effects: tuple[type, ...] = (FetchGroup,)

    def __init__(self, bus: Bus, topic: str, run: str, meter: Meter, *, clock: Clock) -> None:
        self._bus, self._topic, self._run = bus, topic, run
        self._meter, self._clock = meter, clock
        self._groups: deque[_Group] = deque()

    def start(self, effect: FetchGroup) -> None:
        first = effect.trajectories[0]
        group = _Group(
            request=effect.request,
            tp=TopicPartition(self._topic, first.partition),
            wanted=first.offset,
            until_ns=self._clock.now_ns() + READ_TIMEOUT_NS,
            left=deque(effect.trajectories),
        )
        self._groups.append(group)

    def poll(self) -> list[Any]:
        if not self._groups:
            return []
        group = self._groups.popleft()
        events = list(
            attempt("FetchGroup", partial(self._next, group), partial(_lost_group, group))
        )
        if events:
            group.close()
        else:
            self._groups.append(group)
        return events

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def close(self) -> None:
        while self._groups:
            self._groups.popleft().close()

    def _next(self, group: _Group) -> Iterator[GroupFetched]:
        with self._meter.spend("bus"):
            record = group.read(self._bus)
        if record is None:
            if self._clock.now_ns() >= group.until_ns:
                yield _broken_group(group, "timed out reading it")
            return
        taken = group.left.popleft()
        why = self._add(group, taken, record)
        if why:
            yield _broken_group(group, f"{taken.trajectory}: {why}")
        elif not group.left:
            yield GroupFetched(request=group.request, trajectories=group.found)
        else:
            group.wanted = group.left[0].offset

    def _add(self, group: _Group, taken: TakenTrajectory, record: Record) -> str:
        if (record.partition, record.offset) != (taken.partition, taken.offset):
            return f"there is no record at offset {taken.offset}"
        if record_digest(record) != taken.sha256:
            return "its bytes differ from the logged ones"
        try:
            with self._meter.spend("codec"):
                one = decode_trajectory(record.value)
        except SchemaError as error:
            return error.message
        meta = one.meta
        said = (one.trajectory, meta.attempt, meta.incarnation, meta.run)
        if said != (taken.trajectory, taken.attempt, taken.incarnation, self._run):
            return f"the record there is {one.trajectory}, attempt {meta.attempt}, of {meta.run}"
        if one.reward is None:
            return "it has no valid reward"
        group.found.append(one)
        return ""


def _broken_group(group: _Group, why: str) -> GroupFetched:
    return GroupFetched(request=group.request, trajectories=(), why=why)


def _lost_group(group: _Group, error: Exception) -> list[GroupFetched]:
    """Raises BusError: those of a group were handled before."""
    if isinstance(error, BusError):
        raise error
    return [_broken_group(group, reason(error))]
