"""Tests of `why` for agents and failing tasks."""

from __future__ import annotations

from typing import Any

from dora_pipe.observe.why import ADVICE, RoleAnswer, roles_of
from dora_pipe.schemas.identity import trajectory_id
from dora_pipe.schemas.metrics import Blocker, FailingServer, UnansweredCall, Wait
from tests.support.catalogue_stage import SECOND_NS
from tests.support.stats_stage import Stage


def worker_in(stage: Stage) -> RoleAnswer:
    (role,) = [role for role in roles_of(stage.stats, stage.now_ns) if role.role == "w0"]
    return role


def test_a_worker_names_its_agents_and_the_age_of_the_oldest_call() -> None:
    stage = Stage()
    incarnation = stage.worker()
    since_ns = stage.now_ns - 12 * SECOND_NS
    stage.status("w0", incarnation, active=2, with_agent=9, calls_open=3, call_since_ns=since_ns)
    assert worker_in(stage).text == (
        "samples 2 requests of version 0, 9 with their agents, 3 open calls, the longest for 12.0 s"
    )
    stage.status("w0", incarnation, active=2)
    assert worker_in(stage).text == "samples 2 requests of version 0"


def test_a_place_that_fails_is_named_and_blocks_what_waits_for_its_task() -> None:
    stage = Stage()
    incarnation = stage.worker()
    since_ns = stage.now_ns - 12 * SECOND_NS
    server = FailingServer(
        task="games",
        url="tcp://games-1:7000",
        failures=3,
        since_ns=since_ns,
        suspended=True,
        reason="the connection ended",
    )
    wait = Wait(name="reward", description="rewards (2)", since_ns=since_ns, blocking=True)
    stage.status("w0", incarnation, failing=(server,), waits=(wait,))
    worker = worker_in(stage)
    line = "task games: tcp://games-1:7000 in back-off, 3 failures in a row in 12.0 s: "
    assert worker.failing == worker.chain == (f"{line}the connection ended",)
    assert (worker.line, worker.advice) == (
        "w0: waiting for rewards (2) (12.0 s)",
        ADVICE["reward"],
    )


def test_a_session_names_the_calls_that_wait() -> None:
    stage = Stage()
    incarnation = stage.worker()
    spec = stage.group(0, incarnation)
    name = trajectory_id(spec.group, 0)
    calls = (
        UnansweredCall(trajectory_id(stage.spec(1).group, 0), 1, stage.now_ns, "slots"),
        UnansweredCall(name, 4, stage.now_ns - 2 * SECOND_NS, "slots"),
    )
    wait = Wait(
        name="agent",
        description="agents (1)",
        since_ns=stage.now_ns,
        blocking=True,
        blockers=(Blocker("trajectory", name),),
    )
    texts: dict[str, Any] = {"calls_open": 2, "calls_oldest": calls, "calls_before": (-1, 12)}
    stage.status("w0", incarnation, waits=(wait,), **texts)
    (line,) = worker_in(stage).chain
    assert line.startswith(f"{name}: on w0 for ")
    assert line.endswith("; call 4 waiting for slots, 2.0 s, 12 before it")
