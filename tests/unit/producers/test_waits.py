"""Tests of a worker's reported waits."""

from __future__ import annotations

from typing import Any

from dora_pipe.producers.worker.request import Phase, RequestState, Served
from dora_pipe.producers.worker.session import CallKey, Session
from dora_pipe.producers.worker.status import TOKENS_QUIET_NS, Situation, waits
from dora_pipe.schemas.metrics import Blocker
from dora_pipe.schemas.rounds import ScheduledRequest
from tests.support.worker import setup_of, spec_of

NOW_NS = 100_000_000_000
HEARTBEAT_NS = 500_000_000


def request(phase: Phase, ordinal: int = 0, *, ago_ns: int = 0) -> RequestState:
    request = ScheduledRequest(
        spec=spec_of(ordinal),
        trajectory=f"g{ordinal:010d}-000",
        sample=0,
        attempt=1,
        worker="w0",
        incarnation=3,
    )
    params = setup_of(3).params["train"]
    return RequestState(
        key=f"g{ordinal:010d}-000/1",
        place=request,
        pin=request.spec.version,
        served=Served(request.spec.version, request.spec.digest),
        params=params,
        max_turns=1,
        seed=1,
        placed_ns=0,
        phase=phase,
        since_ns=NOW_NS - ago_ns,
    )


def situation(**changes: Any) -> Situation:
    plain = {
        "served": 4,
        "loading": None,
        "loading_ns": 0,
        "tokens_ns": NOW_NS,
        "now_ns": NOW_NS,
        "heartbeat_ns": HEARTBEAT_NS,
    }
    return Situation(**(plain | changes))


def test_worker_without_requests_waits_for_those_of_its_version() -> None:
    (wait,) = waits([], situation())
    assert (wait.name, wait.words, wait.limit) == ("requests", "requests of version 4", "work")


def test_loading_comes_before_everything_and_began_when_it_was_ordered() -> None:
    (wait,) = waits([request(Phase.WAITING)], situation(loading=9, loading_ns=7))
    assert (wait.name, wait.key, wait.since_ns, wait.still) == ("weights", "9", 7, True)
    assert list(wait.blockers) == [Blocker("version", "9")]


def test_worker_that_samples_waits_for_nothing() -> None:
    assert (
        waits([request(Phase.RUNNING), request(Phase.WAITING, 1, ago_ns=10**10)], situation()) == []
    )


def test_reward_that_takes_its_time_is_named_beside_the_work_from_its_oldest_on() -> None:
    rows = [
        request(Phase.RUNNING),
        request(Phase.REWARDING, 1, ago_ns=HEARTBEAT_NS),
        request(Phase.REWARDING, 2, ago_ns=3 * HEARTBEAT_NS),
        request(Phase.REWARDING, 3, ago_ns=1),
    ]
    (wait,) = waits(rows, situation())
    assert (wait.name, wait.words, wait.still) == ("reward", "rewards (2)", False)
    assert wait.since_ns == NOW_NS - 3 * HEARTBEAT_NS
    assert [blocker.id for blocker in wait.blockers] == ["g0000000002-000", "g0000000001-000"]


def test_engine_that_gives_no_token_for_long_is_waited_for() -> None:
    quiet = situation(tokens_ns=NOW_NS - TOKENS_QUIET_NS)
    assert waits([request(Phase.RUNNING)], quiet) == []
    (wait,) = waits([request(Phase.RUNNING)], situation(tokens_ns=NOW_NS - TOKENS_QUIET_NS - 1))
    assert (wait.name, wait.still) == ("tokens", True)
    assert wait.since_ns == NOW_NS - TOKENS_QUIET_NS - 1


def test_agent_that_thinks_works_and_one_whose_call_is_under_way_is_not_waited_for() -> None:
    agent = request(Phase.AGENT, 1)
    agent.session = Session()
    (wait,) = waits([agent], situation())
    assert (wait.words, wait.limit) == ("agents (1)", "work")
    agent.session.open[CallKey("prompt", 0)] = "its call"
    answering = request(Phase.ANSWERING, 2)
    (wait,) = waits([agent, answering], situation())
    assert (wait.words, wait.limit) == ("calls to be durable (1)", "short")
