"""Tests of the port that reads progress chains."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog, MemoryReader
from dora_pipe.core.errors import LogTruncated
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Append, TopicPartition
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.producers.worker.effects import FetchProgress, ProgressFetched
from dora_pipe.producers.worker.ports import RecordPort
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import encode_any_progress
from tests.support.batches import progress_chunk
from tests.support.bus_steps import ScriptedFaults
from tests.support.worker import VirtualClock

PROGRESS = "r.progress"
LIMIT_S = 60.0


def _log(*values: bytes) -> tuple[MemoryBus, list[int]]:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=PROGRESS, partitions=2)])
    writer = bus.writer()
    return bus, [writer.append([Append(topic=PROGRESS, value=v, partition=1)])[0] for v in values]


def _effect(offset: int) -> FetchProgress:
    return FetchProgress(request="a", resume=Resume(tokens=1, partition=1, offset=offset))


def _fetch(bus: MemoryBus, offset: int, clock: VirtualClock | None = None) -> ProgressFetched:
    port = RecordPort(bus, Topics("r"), Meter(), clock=clock or VirtualClock(), in_thread=False)
    port.start(_effect(offset))
    (event,) = port.poll()
    assert isinstance(event, ProgressFetched)
    return event


def _chain(length: int) -> tuple[MemoryBus, list[int]]:
    bus, offsets = _log()
    writer = bus.writer()
    for start in range(length):
        value = encode_any_progress(
            progress_chunk(start, [start], previous=offsets[-1] if offsets else -1)
        )
        offsets += writer.append([Append(topic=PROGRESS, value=value, partition=1)])
    return bus, offsets


def _starts(fetched: ProgressFetched) -> list[int]:
    return [chunk.start for chunk in fetched.chunks if isinstance(chunk, Progress)]


def test_chain_is_followed_back_over_gaps_and_comes_oldest_first() -> None:
    bus, offsets = _chain(5)
    assert offsets[-1] > 5
    fetched = _fetch(bus, offsets[-1])
    assert _starts(fetched) == [0, 1, 2, 3, 4]
    assert fetched.why == ""


def test_chain_on_a_log_that_is_away_is_tried_again_and_given_up_in_the_end() -> None:
    bus, offsets = _chain(2)
    away = MemoryBus(bus.log, faults=ScriptedFaults(polls={0, 1, 2}))
    assert _starts(_fetch(away, offsets[-1])) == [0, 1]
    removed_bus = MemoryBus(bus.log, faults=ScriptedFaults(polls=range(10_000)))
    clock = VirtualClock()
    assert "timed out reading it" in _fetch(removed_bus, offsets[-1], clock).why
    assert 10.0 <= clock.ns / 1e9 < 11.0


class StallingBus(MemoryBus):
    stalled, go = threading.Event(), threading.Event()

    def reader(self, positions: Mapping[TopicPartition, int]) -> MemoryReader:
        self.stalled.set()
        assert self.go.wait(LIMIT_S)
        return super().reader(positions)


def test_a_log_that_stalls_does_not_hold_the_loop() -> None:
    bus, offsets = _chain(2)
    stalling = StallingBus(bus.log)
    port = RecordPort(stalling, Topics("r"), Meter(), clock=SystemClock())
    port.start(_effect(offsets[-1]))
    assert stalling.stalled.wait(LIMIT_S)
    assert port.poll() == [] and port.working
    stalling.go.set()
    port.wait(LIMIT_S)
    (event,) = port.poll()
    assert isinstance(event, ProgressFetched) and _starts(event) == [0, 1]
    port.close()


def test_position_beyond_the_log_is_never_taken_for_a_broken_chain() -> None:
    bus, offsets = _chain(2)
    with pytest.raises(LogTruncated):
        _fetch(bus, offsets[-1] + 100)
