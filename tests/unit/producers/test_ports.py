"""The worker's ports: bounded bits of work, events for every effect, chains that break."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.bus.memory import MemoryBus, MemoryLog, ScriptedFaults
from dora_pipe.bus.port import Append, TopicSpec
from dora_pipe.errors import LogTruncated
from dora_pipe.producers.effects import (
    EncodeFailed,
    EncodeProgress,
    EncodeTrajectory,
    EngineAdd,
    EngineCancel,
    EngineExport,
    EngineExported,
    EngineStarted,
    FetchProgress,
    LoadFailed,
    LoadWeights,
    Observed,
    ProgressEncoded,
    ProgressFetched,
    Prompted,
    Score,
    StepEnvironment,
    TrajectoryEncoded,
)
from dora_pipe.producers.engines.port import (
    EngineEvent,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine
from dora_pipe.producers.ports import STEP_NS, EnginePort, TaskPort
from dora_pipe.producers.record_ports import CodecPort, ProgressPort
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    RewardCall,
    Rewarded,
)
from dora_pipe.runtime import Meter
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.progress import Progress
from dora_pipe.schemas.trajectory_codec import decode_trajectory, encode_progress
from tests.support.batches import make_trajectory
from tests.support.inline_tasks import InlineTasks, Numbers
from tests.support.worker import VirtualClock

PARAMS = SamplingParams(max_tokens=100, stop_ids=(END_TOKEN,))
PROGRESS = "r.progress"


def _request(name: str, tokens: int = 3) -> EngineRequest:
    return EngineRequest(
        request=name, token_ids=[5] * tokens, sampled=0, seed=ord(name), params=PARAMS
    )


def _engine(slots: int = 2, length: int = 5) -> SimulatedEngine:
    return SimulatedEngine(slots=slots, context_tokens=64, lengths=lambda seed, turn: length)


def _engine_port(
    engine: SimulatedEngine, *, steps_max: int = 64, thread: bool = False
) -> EnginePort:
    port = EnginePort(engine, Path, clock=VirtualClock(), in_thread=thread, steps_max=steps_max)
    port.start(LoadWeights(version=0, digest="a"))
    while port.poll() == []:
        pass
    return port


def test_engine_is_stepped_many_times_and_refilled_between_two_steps() -> None:
    engine = _engine(slots=2, length=5)
    port = _engine_port(engine, steps_max=10)
    for name in "abcd":
        port.start(EngineAdd(request=_request(name)))
    assert engine.active == 0
    finished = [event for event in port.poll() if isinstance(event, RequestFinished)]
    assert [event.request for event in finished] == ["a", "b", "c", "d"]
    assert not port.busy


def test_engine_stops_stepping_when_its_time_is_over() -> None:
    engine = _engine(slots=1, length=50)
    clock = VirtualClock()
    port = EnginePort(engine, Path, clock=clock, in_thread=False)
    port.start(LoadWeights(version=0, digest="a"))
    port.poll()
    port.start(EngineAdd(request=_request("a")))
    step = engine.step

    def slow() -> list[object]:
        clock.sleep(0.3 * STEP_NS / 1e9)
        return list(step())

    engine.step = slow  # type: ignore[method-assign, assignment]
    port.poll()
    assert engine.kv_used_tokens == 3 + 4
    assert port.busy


def test_request_ahead_is_cancelled_before_it_reaches_the_engine() -> None:
    engine = _engine(slots=1)
    port = _engine_port(engine, steps_max=1)
    for name in "ab":
        port.start(EngineAdd(request=_request(name)))
    port.poll()
    port.start(EngineCancel(request="b"))
    port.start(EngineCancel(request="a"))
    assert port.poll() == []
    assert (engine.active, port.busy) == (0, False)


def test_exported_request_tells_what_it_sampled_and_comes_with_its_cache() -> None:
    engine = _engine(slots=1, length=50)
    port = _engine_port(engine, steps_max=4)
    port.start(EngineAdd(request=_request("a")))
    port.poll()
    port.start(EngineExport(request="nobody"))
    port.start(EngineExport(request="a"))
    assert (engine.active, port.busy) == (0, True)
    sampled, exported = port.poll()
    assert isinstance(sampled, TokensSampled) and len(sampled.token_ids) == 4
    assert isinstance(exported, EngineExported) and exported.kv is not None
    assert (exported.kv.tokens, port.busy) == (3 + 4 - 1, False)


def test_cache_that_does_not_fit_is_named_and_its_request_prefilled() -> None:
    engine = _engine(slots=1, length=50)
    port = _engine_port(engine, steps_max=4)
    port.start(EngineAdd(request=_request("a")))
    port.poll()
    port.start(EngineExport(request="a"))
    sampled, exported = port.poll()
    again = replace(
        _request("a"), token_ids=[5, 5, 5, *sampled.token_ids], sampled=4, kv=exported.kv
    )
    unfit = replace(again, request="b", kv=replace(exported.kv, weights="other"))
    port.start(EngineAdd(request=again))
    port.start(EngineAdd(request=unfit))
    started = []
    while engine.active or port.busy:
        started += [event for event in port.poll() if isinstance(event, EngineStarted)]
    assert [(one.request, one.imported, one.why) for one in started] == [
        ("a", True, ""),
        ("b", False, "other weights"),
    ]


def test_request_that_the_engine_refuses_has_ended_with_an_error() -> None:
    port = _engine_port(_engine())
    port.start(EngineAdd(request=_request("a", tokens=64)))
    started, event = port.poll()
    assert isinstance(started, EngineStarted)
    assert isinstance(event, RequestFinished)
    assert (event.request, event.reason) == ("a", "error")
    assert event.error is not None and "64 tokens" in event.error


@pytest.mark.parametrize("thread", [False, True])
def test_weights_that_cannot_be_loaded_are_an_event(thread: bool) -> None:
    port = _engine_port(_engine(), thread=thread)
    port.start(LoadWeights(version=-1, digest="b"))
    events: list[object] = []
    while not events:
        events = port.poll()
    (event,) = events
    assert isinstance(event, LoadFailed)
    assert "version -1" in event.message
    port.close()


def test_weights_are_loaded_beside_the_loop() -> None:
    port = EnginePort(_engine(), Path, clock=VirtualClock(), in_thread=True)
    port.start(LoadWeights(version=3, digest="a"))
    events: list[object] = []
    while not events:
        events = port.poll()
    assert events == [WeightsLoaded(version=3, digest="a", load_ms=0.0)]
    port.close()


# Tasks


def test_rows_stay_while_weights_are_loaded_under_them_and_cancels_wait() -> None:
    """The loading thread has the engine: nobody else may change its rows meanwhile."""
    engine = _engine(slots=2, length=50)
    port = _engine_port(engine, steps_max=4, thread=True)
    for name in "ab":
        port.start(EngineAdd(request=_request(name)))
    port.poll()
    begun, may_end = threading.Event(), threading.Event()
    reload = engine.reload_keeping

    def slow(weights: Path, *, version: int, digest: str) -> list[EngineEvent]:
        begun.set()
        assert may_end.wait(10)
        return reload(weights, version=version, digest=digest)

    engine.reload_keeping = slow  # type: ignore[method-assign]
    port.start(LoadWeights(version=1, digest="b", keep=True))
    assert begun.wait(10)
    port.start(EngineCancel(request="a"))
    assert (port.poll(), engine.active) == ([], 2)
    may_end.set()
    events: list[Any] = []
    while not events:
        events = port.poll()
    before = events[: [type(one) for one in events].index(WeightsLoaded)]
    assert [(type(one), one.request) for one in before] == [
        (TokensSampled, "a"),
        (TokensSampled, "b"),
    ]
    assert all(len(one.token_ids) == 4 for one in before)
    assert engine.active == 1


def test_texts_become_token_ids_on_the_way_up_and_text_on_the_way_down() -> None:
    tasks = InlineTasks(episodes=True)
    port = TaskPort(tasks, Numbers())
    port.start(PromptCall(request="a", split="train", index=3))
    assert port.poll() == [Prompted(request="a", token_ids=[5, 6, 7], episode=True)]
    port.start(StepEnvironment(request="a", token_ids=[8, 9]))
    assert port.poll() == [Observed(request="a", token_ids=[9, 9], done=True, tool="", ok=True)]
    assert tasks.seen[-1] == EnvStep(request="a", text="8 9")
    score = Score(request="a", split="eval", index=3, answer=[8], turns=[[8], [9]])
    port.start(score)
    (event,) = port.poll()
    assert isinstance(event, Rewarded)
    asked: object = tasks.seen[-1]
    assert asked == RewardCall(request="a", split="eval", index=3, text="8", turns=("8", "9"))
    port.start(replace(score, turns=[[8]]))
    assert isinstance(tasks.seen[-1], RewardCall) and tasks.seen[-1].turns == ("8",)


def test_forgetting_reaches_the_pool_and_closing_closes_it() -> None:
    tasks = InlineTasks(held={PromptCall})
    port = TaskPort(tasks, Numbers())
    port.start(PromptCall(request="a", split="train", index=3))
    port.start(Forget(request="a"))
    assert (tasks.calls, tasks.forgotten, port.busy) == ([], ["a"], False)
    tasks.events.append(EnvObserved(request="b", text="1", done=False, tool="t", ok=False))
    assert port.busy
    port.close()


# Codec


def _trajectory_effect() -> EncodeTrajectory:
    return EncodeTrajectory(request="a", trajectory=make_trajectory("g0000000000-000"))


def test_codec_makes_value_headers_and_digest_and_books_the_time() -> None:
    meter = Meter()
    port = CodecPort(meter, clock=VirtualClock())
    for _ in range(20):
        port.start(_trajectory_effect())
    assert port.busy
    events = port.poll()
    assert len(events) == 20 and not port.busy
    encoded = events[0]
    assert isinstance(encoded, TrajectoryEncoded)
    assert decode_trajectory(encoded.value) == _trajectory_effect().trajectory
    assert dict(encoded.headers)["sha256"].decode() == encoded.sha256
    assert meter.cost().codec_s > 0


def test_record_that_breaks_its_rules_is_an_event() -> None:
    port = CodecPort(Meter(), clock=VirtualClock())
    broken = replace(make_trajectory("g0000000000-000"), digest="0")
    port.start(EncodeTrajectory(request="a", trajectory=broken))
    (event,) = port.poll()
    assert isinstance(event, EncodeFailed)
    assert "64 hex digits" in event.message


def test_codec_stops_when_its_time_is_over() -> None:
    class Ticking(VirtualClock):
        def now_ns(self) -> int:
            self.ns += 2_000_000
            return self.ns

    port = CodecPort(Meter(), clock=Ticking())
    for _ in range(10):
        port.start(_trajectory_effect())
    assert len(port.poll()) == 3
    assert port.busy
    port.close()
    assert not port.busy


# Progress chains


def _chunk(start: int, previous: int) -> Progress:
    return Progress(
        trajectory="g0000000000-000",
        attempt=1,
        version=0,
        digest="0" * 64,
        worker="w0",
        epoch=1,
        start=start,
        token_ids=[start],
        logprobs=[-0.5],
        sampler_logprobs=[-0.5],
        prefills=(3,),
        previous=previous,
        started_ns=1,
    )


def _log(*values: bytes) -> tuple[MemoryBus, list[int]]:
    """A log of these progress records, and the offset of each."""
    bus = MemoryBus(MemoryLog())
    bus.create([TopicSpec(name=PROGRESS, partitions=2)])
    writer = bus.writer()
    return bus, [writer.append([Append(topic=PROGRESS, value=v, partition=1)])[0] for v in values]


def _fetch(bus: MemoryBus, offset: int, clock: VirtualClock | None = None) -> ProgressFetched:
    clock = clock or VirtualClock()
    port = ProgressPort(bus, PROGRESS, Meter(), clock=clock)
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
        value = encode_progress(_chunk(start, offsets[-1] if offsets else -1))
        offsets += writer.append([Append(topic=PROGRESS, value=value, partition=1)])
    return bus, offsets


def test_chain_is_followed_back_over_gaps_and_comes_oldest_first() -> None:
    bus, offsets = _chain(5)
    assert offsets[-1] > 5
    fetched = _fetch(bus, offsets[-1])
    assert [chunk.start for chunk in fetched.chunks] == [0, 1, 2, 3, 4]
    assert fetched.why == ""


def test_chain_begins_where_it_is_asked_for() -> None:
    bus, offsets = _chain(5)
    assert [chunk.start for chunk in _fetch(bus, offsets[2]).chunks] == [0, 1, 2]


def test_chain_with_a_record_that_is_not_there_breaks() -> None:
    bus, offsets = _chain(3)
    fetched = _fetch(bus, offsets[1] + 1)
    assert fetched.chunks == ()
    assert f"no record at offset {offsets[1] + 1}" in fetched.why


def test_chain_with_a_record_that_cannot_be_read_breaks() -> None:
    bus, offsets = _log(b"nonsense")
    assert f"the record at offset {offsets[0]}" in _fetch(bus, offsets[0]).why


def test_chain_that_names_itself_breaks() -> None:
    bus, offsets = _log(encode_progress(_chunk(1, 0)))
    assert offsets == [0]
    assert "names no earlier one" in _fetch(bus, 0).why


def test_chain_on_a_log_that_is_away_is_tried_again_and_given_up_in_the_end() -> None:
    bus, offsets = _chain(2)
    away = MemoryBus(bus.log, faults=ScriptedFaults(polls={0, 1, 2}))
    assert [chunk.start for chunk in _fetch(away, offsets[-1]).chunks] == [0, 1]
    gone = MemoryBus(bus.log, faults=ScriptedFaults(polls=range(10_000)))
    clock = VirtualClock()
    assert "could not be read in time" in _fetch(gone, offsets[-1], clock).why
    assert 10.0 <= clock.ns / 1e9 < 11.0


def test_position_beyond_the_log_is_never_taken_for_a_broken_chain() -> None:
    bus, offsets = _chain(2)
    with pytest.raises(LogTruncated):
        _fetch(bus, offsets[-1] + 100)


def test_several_chains_are_read_turn_by_turn() -> None:
    bus, offsets = _chain(4)
    port = ProgressPort(bus, PROGRESS, Meter(), clock=VirtualClock())
    for name, offset in (("long", offsets[3]), ("short", offsets[0])):
        resume = Resume(tokens=1, partition=1, offset=offset)
        port.start(FetchProgress(request=name, resume=resume))
    order = [event.request for _ in range(5) for event in port.poll()]
    assert order == ["short", "long"]
    assert not port.busy


def test_progress_is_encoded_too() -> None:
    port = CodecPort(Meter(), clock=VirtualClock())
    port.start(EncodeProgress(request="a", progress=_chunk(0, -1)))
    assert isinstance(port.poll()[0], ProgressEncoded)
