"""The worker's ports to its records: the codec, and chains of progress records.

They decide how much is done at a time: records for `CODEC_BUDGET_NS`, chains record by record.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any, Final

from dora_pipe.bus.port import Bus, Reader, Record, TopicPartition
from dora_pipe.clock import Clock
from dora_pipe.errors import BusError, SchemaError
from dora_pipe.patience import FINAL_ERRORS
from dora_pipe.producers.effects import (
    EncodeFailed,
    EncodeProgress,
    EncodeTrajectory,
    FetchProgress,
    ProgressEncoded,
    ProgressFetched,
    TrajectoryEncoded,
)
from dora_pipe.runtime import Meter
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.trajectory_codec import (
    decode_progress,
    encode_progress,
    encode_trajectory,
    header_pairs,
)

CODEC_BUDGET_NS: Final = 5_000_000

CHAIN_MAX: Final = 4096
"""Progress records of one request; a longer chain is not followed."""

CHAIN_TIMEOUT_NS: Final = 10_000_000_000
"""A chain that could not be read in this time is given up: its request starts from the prompt."""


class CodecPort:
    """Makes the bytes of trajectories and progress records, booked to the meter as `codec`."""

    effects: tuple[type, ...] = (EncodeTrajectory, EncodeProgress)

    def __init__(self, meter: Meter, *, clock: Clock) -> None:
        self._meter = meter
        self._clock = clock
        self._queue: deque[EncodeTrajectory | EncodeProgress] = deque()

    def start(self, effect: EncodeTrajectory | EncodeProgress) -> None:
        """Queue a record."""
        self._queue.append(effect)

    def poll(self) -> list[Any]:
        """Records for the budget, in order."""
        if not self._queue:
            return []
        events: list[Any] = []
        until_ns = self._clock.now_ns() + CODEC_BUDGET_NS
        with self._meter.spend("codec"):
            while self._queue:
                events.append(_encoded(self._queue.popleft()))
                if self._clock.now_ns() >= until_ns:
                    break
        return events

    @property
    def busy(self) -> bool:
        """Whether records wait."""
        return bool(self._queue)

    def close(self) -> None:
        """Forget what waits."""
        self._queue.clear()


def _encoded(
    effect: EncodeTrajectory | EncodeProgress,
) -> TrajectoryEncoded | ProgressEncoded | EncodeFailed:
    try:
        if isinstance(effect, EncodeProgress):
            return ProgressEncoded(request=effect.request, value=encode_progress(effect.progress))
        value, headers = encode_trajectory(effect.trajectory)
        return TrajectoryEncoded(
            request=effect.request,
            value=value,
            headers=header_pairs(headers),
            sha256=headers.sha256,
        )
    except SchemaError as error:
        return EncodeFailed(request=effect.request, message=error.message)


@dataclass(slots=True, kw_only=True)
class _Chain:
    """A chain while it is read, newest record first."""

    request: str
    tp: TopicPartition
    wanted: int
    """Offset of the record that is read next."""
    until_ns: int
    reader: Reader | None = None
    found: list[Progress] = field(default_factory=list)


class ProgressPort:
    """Follows chains of progress records back to their beginning.

    A chain that breaks (a record that is not there, cannot be read, or names a later one as the
    one before it) comes back empty, with the reason.
    """

    effects: tuple[type, ...] = (FetchProgress,)

    def __init__(self, bus: Bus, topic: str, meter: Meter, *, clock: Clock) -> None:
        self._bus = bus
        self._topic = topic
        self._meter = meter
        self._clock = clock
        self._chains: deque[_Chain] = deque()

    def start(self, effect: FetchProgress) -> None:
        """Begin at the newest record."""
        chain = _Chain(
            request=effect.request,
            tp=TopicPartition(self._topic, effect.resume.partition),
            wanted=effect.resume.offset,
            until_ns=self._clock.now_ns() + CHAIN_TIMEOUT_NS,
        )
        self._chains.append(chain)

    def poll(self) -> list[Any]:
        """The next record of the chain whose turn it is."""
        if not self._chains:
            return []
        chain = self._chains.popleft()
        event = self._next(chain)
        if event is None:
            self._chains.append(chain)
            return []
        _let_go(chain)
        return [event]

    @property
    def busy(self) -> bool:
        """Whether a chain is being read."""
        return bool(self._chains)

    def close(self) -> None:
        """Give up what is being read."""
        while self._chains:
            _let_go(self._chains.popleft())

    def _next(self, chain: _Chain) -> ProgressFetched | None:
        record = self._read(chain)
        if record is None:
            late = self._clock.now_ns() >= chain.until_ns
            return _broken(chain, "it could not be read in time") if late else None
        if record.offset != chain.wanted:
            return _broken(chain, f"there is no record at offset {chain.wanted}")
        try:
            with self._meter.spend("codec"):
                chunk = decode_progress(record.value)
        except SchemaError as error:
            return _broken(chain, f"the record at offset {record.offset}: {error.message}")
        chain.found.append(chunk)
        if chunk.previous < 0:
            return ProgressFetched(request=chain.request, chunks=chain.found[::-1])
        if chunk.previous >= chain.wanted or len(chain.found) >= CHAIN_MAX:
            return _broken(chain, f"the record at offset {record.offset} names no earlier one")
        chain.wanted = chunk.previous
        return None

    def _read(self, chain: _Chain) -> Record | None:
        """The first record from the wanted offset on; None as long as the bus has none to give."""
        with self._meter.spend("bus"):
            try:
                if chain.reader is None:
                    chain.reader = self._bus.reader({chain.tp: chain.wanted})
                chain.reader.seek(chain.tp, chain.wanted)
                records = chain.reader.poll(timeout_s=0.0, records_max=1)
            except FINAL_ERRORS:
                raise
            except BusError:
                return None
        return records[0] if records else None


def _let_go(chain: _Chain) -> None:
    if chain.reader is not None:
        chain.reader.close()


def _broken(chain: _Chain, why: str) -> ProgressFetched:
    return ProgressFetched(request=chain.request, chunks=(), why=why)
