"""Tests of the port that reads progress chains."""

from __future__ import annotations

import pytest

from dora_pipe.bus.bus import TopicSpec
from dora_pipe.bus.memory import MemoryBus, MemoryLog, ScriptedFaults
from dora_pipe.core.errors import LogTruncated
from dora_pipe.core.loop.runtime import Meter
from dora_pipe.core.pure.records import Append
from dora_pipe.producers.worker.effects import FetchProgress, ProgressFetched
from dora_pipe.producers.worker.ports import RecordPort
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.topics import Topics
from dora_pipe.schemas.trajectory import Progress
from dora_pipe.schemas.trajectory_codec import encode_any_progress
from tests.support.worker import VirtualClock

PROGRESS = "r.progress"


def _chunk(start: int, previous: int) -> Progress:
    return Progress(
        trajectory="g0000000000-000",
        attempt=1,
        version=0,
        digest="0" * 64,
        worker="w0",
        incarnation=1,
        start=start,
        token_ids=[start],
        logprobs=[-0.5],
        sampler_logprobs=[-0.5],
        prefills=(3,),
        previous=previous,
        started_ns=1,
    )


def _log(*values: bytes) -> tuple[MemoryBus, list[int]]:
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=PROGRESS, partitions=2)])
    writer = bus.writer()
    return bus, [writer.append([Append(topic=PROGRESS, value=v, partition=1)])[0] for v in values]


def _fetch(bus: MemoryBus, offset: int, clock: VirtualClock | None = None) -> ProgressFetched:
    clock = clock or VirtualClock()
    port = RecordPort(bus, Topics("r"), Meter(), clock=clock)
    port.start(FetchProgress(request="a", resume=Resume(tokens=1, partition=1, offset=offset)))
    for _ in range(10_000):
        assert port.busy
        events = port.poll()
        clock.sleep(0.01)
        if events:
            assert not port.busy
            (event,) = events
            assert isinstance(event, ProgressFetched)
            return event
    raise AssertionError("it was followed for ever")


def _chain(length: int) -> tuple[MemoryBus, list[int]]:
    bus, offsets = _log()
    writer = bus.writer()
    for start in range(length):
        value = encode_any_progress(_chunk(start, offsets[-1] if offsets else -1))
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


def test_position_beyond_the_log_is_never_taken_for_a_broken_chain() -> None:
    bus, offsets = _chain(2)
    with pytest.raises(LogTruncated):
        _fetch(bus, offsets[-1] + 100)
