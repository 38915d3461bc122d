"""`why` on workers of sessions: how many agents think, what their calls wait for."""

from __future__ import annotations

from msgspec.structs import replace

from dora_pipe.catalogue.statuses import LastStatus
from dora_pipe.observe.why.chain import roles_of
from dora_pipe.observe.why.log import Picture
from dora_pipe.orchestrator.state import State, Worker
from dora_pipe.schemas.metrics import WorkerStatus
from tests.support.stats_stage import COST

AT_NS = 1_000_000_000_000


def _picture(**said: int) -> Picture:
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
