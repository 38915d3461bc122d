"""Tests of views of a session: they equal what its agent received, also after moves."""

from __future__ import annotations

from random import Random

import pytest

from dora_pipe.audit.describe import _by_context, _given_by_agent
from dora_pipe.ledger.calls import call_rows
from dora_pipe.observe.traces.spans import content_of
from dora_pipe.observe.web.contexts import tree_of
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.trajectory import Trajectory
from tests.golden.branched_values import BRANCHED_TRAJECTORY
from tests.golden.later_values import AGENTS_TRAJECTORY
from tests.integration.test_worker_sessions import Stage, told
from tests.support.agents import turns, wandering
from tests.support.worker import TICK_NS


@pytest.fixture(scope="module", params=range(3))
def recorded(request: pytest.FixtureRequest) -> list[tuple[Trajectory, list[int], list[int]]]:
    """Trajectories with the lengths of the prompts and answers that their agents were told."""
    stage = Stage(lambda call: wandering(Random(f"{request.param} {call.request}"), 10), think=3)
    worker = stage.worker(max_tokens=1000)
    for ordinal in range(4):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    found: list[tuple[Trajectory, list[int], list[int]]] = []
    for logged in stage.world.facts(TrajectoryLogged):
        heard = told(worker, f"{logged.trajectory}/1")
        prompts, answers = ([len(one[part]) for one in heard] for part in (0, 1))
        found.append((stage.world.trajectory(logged), prompts, answers))
    assert any(one.meta.contexts for one, *_ in found)
    return found


def test_calls_have_the_prompts_and_answers_that_agents_were_told(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, prompts, answers in recorded:
        rows = list(call_rows(trajectory))
        assert sorted(one.prompt_tokens for one in rows) == sorted(prompts)
        assert sorted(one.tokens for one in rows) == sorted(answers)
        assert all(one.idle_ns >= 0 and one.answered_ns >= one.asked_ns for one in rows)


def test_every_call_stands_with_a_turn_of_the_context_that_it_names(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, *_ in recorded:
        contexts = {
            one.start: number for number, one in _by_context(trajectory) if one.kind == "model"
        }
        rows = zip(trajectory.meta.calls, call_rows(trajectory), strict=True)
        assert all(contexts[call.start] == row.context for call, row in rows)
        assert content_of(trajectory).called == tuple(one.start for one in trajectory.meta.calls)


def test_the_tree_has_every_token_once_and_every_shared_one_where_it_stands(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, *_ in recorded:
        tree = tree_of(trajectory, lambda text: text)
        assert tree is not None
        assert sum(end - start for *_, start, end in tree["contexts"]) == trajectory.length
        for (parent, shared, start, _), pieces in zip(
            tree["contexts"], tree["shared"], strict=True
        ):
            assert sum(end - begin for begin, end in pieces) == shared
            assert all(end <= start for _, end in pieces)
            assert (parent is None) == (shared == 0)


def test_what_an_agent_gave_back_is_told_where_it_gave_something() -> None:
    told = {"rewarded by": "its agent", "agent's answer": "42"}
    assert _given_by_agent(AGENTS_TRAJECTORY.meta) == told
    assert _given_by_agent(BRANCHED_TRAJECTORY.meta) == {}


def test_statuses_name_agents_that_think_and_the_oldest_calls_that_wait() -> None:
    stage = Stage(turns(*([one, one + 1] for one in range(5))), think=40, lengths=lambda *_: 60)
    worker = stage.worker(slots=1, heartbeat_ns=TICK_NS, quiet_ns=TICK_NS)
    for ordinal in range(3):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    statuses = stage.world.statuses()
    assert max(one.with_agent for one in statuses) == 3
    waiting = [one for one in statuses if one.calls_open > one.active == 1]
    assert waiting
    for one in waiting:
        assert len(one.calls_oldest) == one.calls_open
        assert one.call_since_ns == one.calls_oldest[0].since_ns
        assert {"tokens", "slots"} >= {call.waits_for for call in one.calls_oldest} - {
            "calls to be durable"
        }
        slots = [call.waits_for == "slots" for call in one.calls_oldest]
        assert [place >= 0 for place in one.calls_before] == (slots if any(slots) else [])
        assert sorted(place for place in one.calls_before if place >= 0) == [*range(sum(slots))]
    assert max(max(one.calls_before, default=-1) for one in waiting) == 1
    assert statuses[-1].calls_open == statuses[-1].with_agent == 0
