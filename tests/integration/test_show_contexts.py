"""`show` of an agent's trajectory: its contexts, who called, and where each turn stands."""

from __future__ import annotations

import json

import pytest

from tests.support.branched_run import ASKED, PIECES, branch
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper


@pytest.fixture
def branched(copy: RecordedRun) -> tuple[RecordedRun, str]:
    with Tamper(copy) as log:
        return copy, branch(log)


def test_contexts_and_calls_of_an_agent_are_shown(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, name = branched
    code, out, err = call("show", run.directory, name, "--json")
    assert code == 0, err
    result = json.loads(out)
    assert [(row["parent"], row["shared"]) for row in result["contexts"]] == [
        (None, 0),
        (None, 0),
        (0, 6),
        (2, 9),
    ]
    assert [row["calls"] for row in result["contexts"]] == [2, 1, 1, 1]
    assert [row["tokens"] for row in result["contexts"]] == [22, 11, 10, 17]
    assert [(row["context"], row["caller"], row["took ms"]) for row in result["calls"]] == [
        (0, "planner", 38.0),
        (2, "planner", 30.0),
        (1, "searcher", 50.0),
        (0, "planner", 40.0),
        (3, None, 30.0),
    ]
    assert len(result["calls"]) == len(ASKED)
    assert [row["context"] for row in result["segments"]] == [0, 0, 0, 0, 1, 1, 2, 2, 3, 3]
    assert len(result["segments"]) == len(PIECES)


def test_its_trace_has_a_span_for_each_call_with_context_and_caller(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, name = branched
    trace = json.loads(call("show", run.directory, name, "--json")[1])["trace"]
    calls = [row["what"] for row in trace if row["stage"] == "chat"]
    assert calls == [
        "call 0 by planner, context 0, 5 tokens after 6",
        "call 2 by searcher, context 1, 6 tokens after 5",
        "call 1 by planner, context 2, 4 tokens after 6",
        "call 3 by planner, context 0, 7 tokens after 15",
        "call 4, context 3, 5 tokens after 12",
    ]
    sampled = [row["what"] for row in trace if row["stage"] == "sampled"]
    assert "turn 0, 6 tokens; context 1" in sampled


def test_a_run_says_how_often_its_agents_call(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, _ = branched
    code, out, err = call("show", run.directory)
    assert code == 0, err
    assert "1 trajectories, 5.0 calls and 4.0 contexts each" in out
    result = json.loads(call("show", run.directory, "--json")[1])
    assert result["agents"] == {"trajectories": 1, "calls": 5.0, "contexts": 4.0}


def test_a_trajectory_of_one_context_says_nothing_of_contexts(
    call: Call, recorded: RecordedRun
) -> None:
    code, out, err = call("show", recorded.directory, "g0000000010-001", "--json")
    assert code == 0, err
    assert not {"contexts", "calls"} & set(json.loads(out))
    assert "context" not in json.loads(out)["segments"][0]
