"""Tests of views of a session: they equal what its agent received, also after moves."""

from __future__ import annotations

from random import Random

import pytest

from dora_pipe.ledger.calls import call_rows
from dora_pipe.observe.describe import by_context, record_sections
from dora_pipe.observe.web.pages import tree_of
from dora_pipe.schemas.control import TrajectoryLogged
from dora_pipe.schemas.trajectory import Trajectory
from tests.golden.branched_values import BRANCHED_TRAJECTORY
from tests.golden.later_values import AGENTS_TRAJECTORY
from tests.integration.test_worker_sessions import Stage, told
from tests.support.agents import turns, wandering
from tests.support.worker import TICK_NS


@pytest.fixture(scope="module")
def recorded() -> list[tuple[Trajectory, list[int], list[int]]]:
    stage = Stage(lambda call: wandering(Random(f"0 {call.request}"), 10), think=3)
    worker = stage.worker(max_tokens=1000)
    for ordinal in range(4):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    results: list[tuple[Trajectory, list[int], list[int]]] = []
    for logged in stage.world.facts(TrajectoryLogged):
        heard = told(worker, f"{logged.trajectory}/1")
        prompts, answers = ([len(call[part]) for call in heard] for part in (0, 1))
        results.append((stage.world.trajectory(logged), prompts, answers))
    assert any(trajectory.meta.contexts for trajectory, *_ in results)
    return results


def test_calls_have_the_prompts_and_answers_that_agents_were_told(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, prompts, answers in recorded:
        rows = list(call_rows(trajectory))
        assert sorted(row.prompt_tokens for row in rows) == sorted(prompts)
        assert sorted(row.tokens for row in rows) == sorted(answers)
        assert all(row.idle_ns >= 0 and row.answered_ns >= row.asked_ns for row in rows)


def test_every_call_stands_with_a_turn_of_the_context_that_it_names(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, *_ in recorded:
        contexts = {
            segment.start: number
            for number, segment in by_context(trajectory)
            if segment.kind == "model"
        }
        rows = zip(trajectory.meta.calls, call_rows(trajectory), strict=True)
        assert all(contexts[call.start] == row.context for call, row in rows)


def test_the_tree_has_every_token_once_and_every_shared_one_where_it_stands(
    recorded: list[tuple[Trajectory, list[int], list[int]]],
) -> None:
    for trajectory, *_ in recorded:
        tree = tree_of(trajectory)
        assert tree is not None
        assert sum(end - start for *_, start, end in tree["contexts"]) == trajectory.length
        for (parent, shared, start, _), pieces in zip(
            tree["contexts"], tree["shared"], strict=True
        ):
            assert sum(end - begin for begin, end in pieces) == shared
            assert all(end <= start for _, end in pieces)
            assert (parent is None) == (shared == 0)


def test_what_an_agent_gave_back_is_told_where_it_gave_something() -> None:
    replies = {"rewarded by": "agent", "agent's answer": "42"}
    result = record_sections(AGENTS_TRAJECTORY, lambda text: text)["result"]
    assert replies.items() <= result.items()
    result = record_sections(BRANCHED_TRAJECTORY, lambda text: text)["result"]
    assert (result["rewarded by"], result["agent's answer"]) == ("task", None)


def test_statuses_name_agents_that_think_and_the_oldest_calls_that_wait() -> None:
    stage = Stage(
        turns(*([index, index + 1] for index in range(5))), think=40, lengths=lambda *_: 60
    )
    worker = stage.worker(slots=1, heartbeat_ns=TICK_NS, quiet_ns=TICK_NS)
    for ordinal in range(3):
        stage.place(worker, ordinal)
    stage.world.until_idle(worker)
    statuses = stage.world.statuses()
    assert max(status.with_agent for status in statuses) == 3
    waiting = [status for status in statuses if status.calls_open > status.active == 1]
    assert waiting
    for status in waiting:
        assert len(status.calls_oldest) == status.calls_open
        assert status.call_since_ns == status.calls_oldest[0].since_ns
        assert {"tokens", "slots"} >= {call.waits_for for call in status.calls_oldest} - {
            "calls to be durable"
        }
        slots = [call.waits_for == "slots" for call in status.calls_oldest]
        assert [location >= 0 for location in status.calls_before] == (slots if any(slots) else [])
        assert sorted(location for location in status.calls_before if location >= 0) == [
            *range(sum(slots))
        ]
    assert max(max(status.calls_before, default=-1) for status in waiting) == 1
    assert statuses[-1].calls_open == statuses[-1].with_agent == 0
