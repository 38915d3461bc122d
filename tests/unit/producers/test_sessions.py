"""Tests of sessions and their calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from dora_pipe.core.pure.machine import Now, Published
from dora_pipe.producers.engines.engine import RequestFinished, TokensSampled
from dora_pipe.producers.tasks.calls import (
    AgentEnded,
    Forget,
    RewardCall,
    Rewarded,
    TaskFailed,
)
from dora_pipe.producers.worker.effects import (
    CallAsked,
    CloseSession,
    EngineAdd,
    EngineCancel,
    EngineStarted,
    RefuseCall,
)
from dora_pipe.producers.worker.episodes import Episodes
from dora_pipe.producers.worker.request import Phase
from dora_pipe.producers.worker.request_records import trajectory_of
from dora_pipe.producers.worker.requests import Requests
from dora_pipe.producers.worker.sessions import Sessions
from dora_pipe.producers.worker.transitions import Transitions
from dora_pipe.schemas.control import RequestFailed, decode_control
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.rounds import ScheduledRequest
from dora_pipe.schemas.trajectory import TurnProgress, answer_of
from dora_pipe.schemas.trajectory_codec import decode_any_progress, decode_trajectory
from tests.support.worker import OF_AGENTS, setup_of, spec_of

NOW = Now(mono_ns=5, wall_ns=10**18)
TRAJECTORY = trajectory_id(spec_of(0).group, 0)
KEY = f"{TRAJECTORY}/1"


class Driver:
    def __init__(self, **changes: Any) -> None:
        self.requests = Requests(setup_of(incarnation=9, **{**OF_AGENTS, **changes}), nullcontext())
        self.requests.versions = frozenset({0})
        self.sessions = Sessions(self.requests)
        self.transitions = Transitions(self.requests, Episodes(self.requests), self.sessions)
        self.now = NOW
        self.place()

    def place(self) -> None:
        request = ScheduledRequest(
            reason="t",
            spec=spec_of(0),
            trajectory=TRAJECTORY,
            sample=0,
            attempt=1,
            worker="w0",
            incarnation=9,
        )
        assert self.sessions.takes(request)
        self.sessions.place(request, NOW)

    def give(self, *events: Any) -> list[Any]:
        now = self.now
        self.requests.begin_turn(now)
        for event in events:
            self.transitions.handle(event, now)
        self.requests.fill(0)
        return self.requests.out.effects

    def ask(self, call: int, prompt: Sequence[int], **changes: Any) -> list[Any]:
        return self.give(CallAsked(request=KEY, call=call, token_ids=prompt, **changes))

    def sample(self, key: str, tokens: Sequence[int]) -> list[Any]:
        logprobs = [-1.0] * len(tokens)
        return self.give(
            EngineStarted(request=key, at_ns=7),
            TokensSampled(
                request=key,
                token_ids=tokens,
                logprobs=logprobs,
                sampler_logprobs=logprobs,
                first_token_ns=8,
            ),
            RequestFinished(request=key, reason="stop"),
        )

    def log(self, key: str, offset: int) -> list[Any]:
        return self.give(
            Published(tag=f"p:{key}", topic="r.progress", partition=0, offset=offset),
        )

    def written(self) -> TurnProgress:
        progress = decode_any_progress(self.requests.out.publish[-1].record.value)
        assert isinstance(progress, TurnProgress)
        return progress

    def phase(self, key: str = KEY) -> Phase:
        return self.requests.by_key[key].phase


def called(*tokens: int) -> Driver:
    driver = Driver()
    driver.ask(0, [1, 2])
    driver.sample(f"{KEY}#0", tokens)
    driver.log(f"{KEY}#0", 4)
    return driver


def test_wall_clock_that_jumps_back_answers_no_call_before_it_was_asked() -> None:
    driver = Driver()
    driver.ask(0, [1, 2])
    driver.now = replace(NOW, wall_ns=NOW.wall_ns - 5)
    driver.sample(f"{KEY}#0", [7])
    driver.log(f"{KEY}#0", 4)
    session = driver.requests.by_key[KEY].session
    assert session is not None
    (turn,) = session.tree.turns
    assert turn.call.answered_ns == turn.call.asked_ns == NOW.wall_ns


def test_what_ends_a_call_beside_the_run_s_is_the_engine_s_and_stands_in_its_record() -> None:
    driver = Driver()
    run = driver.requests.setup.params["train"]
    (add,) = driver.ask(5, [1, 2], stop=("END",), stop_ids=(7,))
    assert isinstance(add, EngineAdd)
    params = add.request.params
    assert (params.stop, params.stop_ids) == ((*run.stop, "END"), (*run.stop_ids, 7))
    driver.sample(f"{KEY}#0", [7])
    call = driver.written().call
    assert (call.stop, call.stop_ids) == (("END",), (7,))
    driver.log(f"{KEY}#0", 4)
    (add,) = driver.ask(6, [1, 2, 7, 8])
    assert isinstance(add, EngineAdd) and add.request.params.stop_ids == run.stop_ids


def test_call_of_an_agent_that_has_returned_comes_too_late() -> None:
    driver = called(7)
    closed, reward = driver.give(AgentEnded(request=KEY))
    assert closed == CloseSession(request=KEY, source="train")
    assert isinstance(reward, RewardCall) and reward.sampled is not None
    assert (list(reward.sampled.before), list(reward.sampled.answer)) == ([1, 2], [7])
    assert driver.ask(1, [1, 2, 7]) == []
    assert driver.requests.counts["calls too late"] == 1
    driver.give(Rewarded(request=KEY, reward=1.0, raw=None, parts={}))
    assert driver.phase() is Phase.LOGGING


def test_call_that_its_agent_has_not_waited_for_is_no_part_of_the_trajectory() -> None:
    driver = called(7)
    driver.ask(1, [1, 2, 7])
    driver.give(EngineStarted(request=f"{KEY}#1", at_ns=7))
    closed, cancel, reward = driver.give(AgentEnded(request=KEY))
    assert isinstance(closed, CloseSession) and isinstance(reward, RewardCall)
    assert cancel == EngineCancel(request=f"{KEY}#1")
    assert driver.requests.by_key[KEY].sequence.token_ids.tolist() == [1, 2, 7]


def test_engine_s_error_refuses_the_call_and_ends_the_trajectory_with_what_was_answered() -> None:
    driver = called(7)
    driver.ask(1, [1, 2, 7])
    key = f"{KEY}#1"
    driver.give(EngineStarted(request=key, at_ns=7))
    error = RequestFinished(request=key, reason="error", error="no more memory")
    refused, closed, _, forget = driver.give(error)
    assert refused == RefuseCall(
        request=KEY, call=1, status=500, code="engine_error", message="no more memory"
    )
    assert isinstance(closed, CloseSession) and isinstance(forget, Forget)
    meta = decode_trajectory(driver.requests.out.publish[-1].record.value).meta
    assert (meta.finish, meta.error) == ("error", "EngineError: no more memory")
    assert len(meta.calls) == 1


@pytest.mark.parametrize(
    ("event", "error", "retryable"),
    [
        (TaskFailed(request=KEY, error="KeyError", message="'x'"), "KeyError", False),
        (AgentEnded(request=KEY), "NoCall", False),
    ],
)
def test_session_that_ends_without_an_answer_fails(event: Any, error: str, retryable: bool) -> None:
    driver = Driver()
    driver.give(event)
    (append,) = (entry.record for entry in driver.requests.out.publish)
    failed = decode_control(append.value)
    assert isinstance(failed, RequestFailed)
    assert (failed.error, failed.retryable) == (error, retryable)
    assert driver.requests.by_key == {}


def test_answer_that_is_scored_is_the_one_that_the_record_has_last() -> None:
    driver = Driver()
    driver.ask(0, [1, 2])
    driver.ask(1, [9])
    for number, token in ((1, 7), (0, 8)):
        driver.sample(f"{KEY}#{number}", [token])
        driver.log(f"{KEY}#{number}", 5 - number)
    _, reward = driver.give(AgentEnded(request=KEY))
    assert isinstance(reward, RewardCall) and reward.sampled is not None
    record = trajectory_of(driver.requests.by_key[KEY], driver.requests.setup)
    assert list(reward.sampled.answer) == answer_of(record) == [8]
