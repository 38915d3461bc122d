"""Tests of ports to engine and tasks: bounded work, an event per effect."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.engine import (
    EngineEvent,
    EngineRequest,
    RequestFinished,
    SamplingParams,
    TokensSampled,
    WeightsLoaded,
)
from dora_pipe.producers.engines.simulated import END_TOKEN, SimulatedEngine
from dora_pipe.producers.sessions.frames import Addresses
from dora_pipe.producers.tasks.calls import (
    EnvObserved,
    EnvStep,
    Forget,
    PromptCall,
    RewardCall,
    SampledTurns,
)
from dora_pipe.producers.tasks.task import Turn
from dora_pipe.producers.worker.effects import (
    EngineAdd,
    EngineCancel,
    EngineExport,
    EngineExported,
    EnginePortEvent,
    EngineStarted,
    LoadFailed,
    LoadWeights,
)
from dora_pipe.producers.worker.engine_port import EnginePort
from dora_pipe.producers.worker.ports import TaskPort, TaskPorts
from dora_pipe.sim.parts import Numbers
from tests.support.inline_tasks import InlineTasks
from tests.support.worker import VirtualClock

PARAMS = SamplingParams(max_tokens=100, stop_ids=(END_TOKEN,))


def _request(name: str, tokens: int = 3) -> EngineRequest:
    return EngineRequest(
        request=name, token_ids=[5] * tokens, sampled=0, seed=ord(name), params=PARAMS
    )


def _engine(slots: int = 2, length: int = 5) -> SimulatedEngine:
    return SimulatedEngine(
        slots=slots, context_tokens=64, lengths=lambda seed, turn: length, clock=VirtualClock()
    )


def _engine_port(
    engine: SimulatedEngine, *, steps_max: int = 64, thread: bool = False
) -> EnginePort:
    port = EnginePort(engine, Path, clock=VirtualClock(), in_thread=thread, steps_max=steps_max)
    port.start(LoadWeights(version=0, digest="a"))
    while port.poll() == []:
        pass
    return port


def test_cache_that_does_not_fit_is_named_and_its_request_prefilled() -> None:
    engine = _engine(slots=1, length=50)
    port = _engine_port(engine, steps_max=4)
    port.start(EngineAdd(request=_request("a")))
    port.poll()
    port.start(EngineExport(request="a"))
    sampled, exported = port.poll()
    assert isinstance(sampled, TokensSampled) and isinstance(exported, EngineExported)
    assert exported.kv is not None
    again = replace(
        _request("a"), token_ids=[5, 5, 5, *sampled.token_ids], sampled=4, kv=exported.kv
    )
    unfit = replace(again, request="b", kv=replace(exported.kv, weights="other"))
    port.start(EngineAdd(request=again))
    port.start(EngineAdd(request=unfit))
    started = []
    while engine.active or port.busy:
        started += [event for event in port.poll() if isinstance(event, EngineStarted)]
    assert [(effect.request, effect.imported, effect.why) for effect in started] == [
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
    events: list[EnginePortEvent] = []
    while not events:
        events = port.poll()
    (event,) = events
    assert isinstance(event, LoadFailed)
    assert "version -1" in event.message
    port.close()


class Compares(SimulatedEngine):
    def load(self, weights: Path, *, version: int, digest: str) -> WeightsLoaded:
        if weights.name == "damaged":
            raise PolicyError(f"{weights} has another digest")
        return super().load(weights, version=version, digest=digest)


@pytest.mark.parametrize("had", [["damaged", "whole"], ["damaged", "damaged"]])
def test_a_file_that_was_damaged_since_it_was_had_is_had_again_once(had: list[str]) -> None:
    engine = Compares(slots=2, context_tokens=64, clock=VirtualClock())
    files, verified = map(Path, had), list[str]()
    port = EnginePort(
        engine,
        lambda digest: next(files),
        verify=verified.append,
        clock=VirtualClock(),
        in_thread=False,
    )
    port.start(LoadWeights(version=3, digest="a"))
    (effect,) = port.poll()
    assert verified == ["a"] and next(files, None) is None
    if had[1] == "whole":
        assert isinstance(effect, WeightsLoaded) and effect.version == 3
    else:
        assert isinstance(effect, LoadFailed) and "another digest" in effect.message
        assert not effect.local


# Tasks


def test_rows_go_on_while_the_next_weights_are_fetched() -> None:
    begun, may_end = threading.Event(), threading.Event()

    def fetched(digest: str) -> Path:
        begun.set()
        assert may_end.wait(10)
        return Path(digest)

    engine = _engine(slots=2, length=50)
    port = EnginePort(engine, fetched, clock=VirtualClock(), in_thread=True, steps_max=4)
    port.start(EngineAdd(request=_request("a")))
    port.start(LoadWeights(version=1, digest="b", keep=True))
    assert begun.wait(10)
    assert any(isinstance(finished, RequestFinished) for _ in range(20) for finished in port.poll())
    may_end.set()
    events: list[EnginePortEvent] = []
    while not events:
        events = port.poll()
    assert events == [WeightsLoaded(version=1, digest="b", load_ms=0.0)]
    port.close()


def test_rows_stay_while_weights_are_loaded_under_them_and_cancels_wait() -> None:
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
    while not begun.wait(0.05):
        port.poll()  # its file is local: the thread now owns the engine
    port.start(EngineCancel(request="a"))
    assert (port.poll(), engine.active) == ([], 2)
    may_end.set()
    events: list[Any] = []
    while not events:
        events = port.poll()
    before = events[: [type(event) for event in events].index(WeightsLoaded)]
    assert [(type(request), request.request) for request in before] == [
        (TokensSampled, "a"),
        (TokensSampled, "b"),
    ]
    sampled = {len(trajectory.token_ids) for trajectory in before}
    assert len(sampled) == 1 and sampled.pop() % 4 == 0
    assert engine.active == 1


def test_what_an_agent_was_answered_last_is_read_behind_its_prompt() -> None:
    class Reader(Numbers):
        def parse(self, ids: Any, before: Any, tools: Any) -> Turn:
            return Turn(text=f"{before} {ids}")

    tasks = InlineTasks()
    addresses = Addresses(host="127.0.0.1", port=1, secret=b"secret")
    port = TaskPort(tasks, Numbers(), Reader(), addresses)  # type: ignore[arg-type]
    sampled = SampledTurns(answer=[8], before=[5, 6], turns=[[8]])
    port.start(RewardCall(request="a", split="train", index=0, sampled=sampled))
    assert isinstance(tasks.seen[-1], RewardCall)
    assert tasks.seen[-1].completion.text == "[5, 6] [8]"


def test_calls_go_to_the_pool_of_their_source_and_pools_may_serve_several() -> None:
    first, second = InlineTasks(episodes=True), InlineTasks(held={PromptCall})
    shared = TaskPort(second, Numbers())
    ports = {"train/a": TaskPort(first, Numbers()), "train/b": shared, "eval/b": shared}
    router = TaskPorts(ports)
    router.start(PromptCall(request="a", split="train", index=3, source="train/a"))
    router.start(PromptCall(request="b", split="train", index=3, source="train/b"))
    router.start(PromptCall(request="c", split="eval", index=1, source="eval/b"))
    assert [event.request for event in router.poll()] == ["a"]
    router.start(EnvStep(request="a", token_ids=[8], source="train/a"))
    router.start(Forget(request="c", source="eval/b"))
    assert (len(first.seen), second.forgotten) == (2, ["c"])
    second.events.append(EnvObserved(request="b", text="1", done=False, tool="t", ok=False))
    assert (router.busy, [event.request for event in router.poll()]) == (True, ["a", "b"])
    router.close()
