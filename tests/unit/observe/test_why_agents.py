"""`why` on workers of sessions: how many agents think, what their calls wait for."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from dora_pipe.catalogue.statuses import LastStatus
from dora_pipe.observe.why.chain import Chain, roles_of
from dora_pipe.observe.why.log import Picture
from dora_pipe.orchestrator.state import Group, Request, State, Worker
from dora_pipe.schemas.contexts import Call
from dora_pipe.schemas.control import Resume
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.metrics import AskedCall, FailingPlace, WorkerStatus
from dora_pipe.schemas.trajectory import TurnProgress
from tests.support.stats_stage import COST
from tests.support.worker import spec_of

AT_NS = 1_000_000_000_000


def _picture(**said: Any) -> Picture:
    status = WorkerStatus(
        at_ns=AT_NS,
        cost=COST,
        worker="w0",
        epoch=7,
        version=3,
        active=2,
        waiting=1,
        kv_used_tokens=0,
        tokens_total=0,
        progress={},
    )
    status = replace(status, **said)
    state = State(workers={"w0": Worker(name="w0", epoch=7, slots=4, prefetch=1, hosted=3)})
    return Picture(
        at_ns=AT_NS + 1_000_000_000, state=state, heard={"w0": LastStatus(status=status)}
    )


def _text(picture: Picture) -> str:
    (found,) = (one.text for one in roles_of(picture) if one.id == "w0")
    return found


def test_a_worker_says_how_many_agents_think_and_how_long_the_oldest_call_is_open() -> None:
    text = _text(_picture(with_agent=9, calls_open=3, call_since_ns=AT_NS - 11_000_000_000))
    assert text == (
        "w0: samples 2 requests of version 3, 1 ahead of its slots, 9 with their agents, "
        "3 open calls, the longest since 12.0 s"
    )


def test_a_worker_without_sessions_says_nothing_of_them() -> None:
    assert _text(_picture()) == "w0: samples 2 requests of version 3, 1 ahead of its slots"


def test_a_server_that_fails_is_named_below_its_worker_since_when_and_for_what() -> None:
    place = FailingPlace(
        task="games",
        url="tcp://games-1:7000",
        failures=3,
        since_ns=AT_NS - 11_000_000_000,
        left_alone=True,
        why="the connection ended",
    )
    here = FailingPlace(task="shell", failures=1, since_ns=AT_NS, why="8 calls in a row failed")
    (found,) = (one for one in roles_of(_picture(failing=(place, here))) if one.id == "w0")
    assert [(one.kind, one.text) for one in found.because] == [
        (
            "task",
            "task games: tcp://games-1:7000 left alone, 3 failures in a row since 12.0 s: "
            "the connection ended",
        ),
        (
            "task",
            "task shell: its processes tried with one process, 1 failure in a row since "
            "1.0 s: 8 calls in a row failed",
        ),
    ]


RESUME = Resume(tokens=40, partition=0, offset=9)


def _session(answered: TurnProgress | None, **said: Any) -> str:
    """What is said of a sibling that is placed on w0 and has a progress record."""
    picture, spec = _picture(**said), spec_of(0, version=3)
    name = trajectory_id(spec.group, 0)
    request = Request(group=spec.group, sibling=0, attempt=1, worker="w0", epoch=7, resume=RESUME)
    picture.state.groups[spec.group] = Group(spec=spec, results=[None] * spec.size)
    picture.state.requests[name] = request
    picture.answered = lambda resume: answered if resume == RESUME else None
    (found,) = Chain(picture).group(picture.state.groups[spec.group]).because
    return found.text.partition(": ")[2]


def test_a_session_says_how_many_answers_its_agent_has_had_and_when_the_last() -> None:
    turn = TurnProgress(
        trajectory="g0000000000-000",
        attempt=1,
        version=3,
        digest="d" * 64,
        worker="w0",
        epoch=7,
        turn=3,
        context=2,
        parent=-1,
        shared=0,
        given_ids=[1],
        token_ids=[2],
        logprobs=[-0.5],
        sampler_logprobs=[-0.5],
        prefills=(),
        previous=-1,
        started_ns=AT_NS,
        ended_ns=AT_NS - 11_000_000_000,
        call=Call(start=1, end=2, seed=0, asked_ns=0, answered_ns=0, caller="planner"),
    )
    assert _session(turn) == (
        "on w0, 40 tokens at its last progress record; its agent planner has had 4 answers, the "
        "last 12.0 s ago in context 2"
    )


def test_a_request_without_an_agent_says_how_far_it_has_come_alone() -> None:
    assert _session(None) == "on w0, 40 tokens at its last progress record"


def test_a_session_says_which_of_its_calls_waits_for_what() -> None:
    calls = (
        AskedCall(trajectory_id(spec_of(1).group, 0), 1, AT_NS, "slots"),
        AskedCall(trajectory_id(spec_of(0).group, 0), 4, AT_NS - 1_000_000_000, "slots"),
    )
    assert _session(None, calls_open=2, calls_oldest=calls) == (
        "on w0, 40 tokens at its last progress record; its call 4 waits for slots since 2.0 s"
    )
    assert _session(None, calls_open=2, calls_oldest=calls, calls_before=(-1, 12)).endswith(
        "its call 4 waits for slots since 2.0 s, 12 before it"
    )
