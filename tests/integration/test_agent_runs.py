"""A whole run whose rollouts are a script of the package `openai`: two sub-agents at the same time,
several turns, a compaction. What the script was told is what the log has, each token once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.support.agent_run import (
    agent_calls,
    check_answers_stand_behind_their_prompts,
    check_calls_end_where_they_asked,
    check_sampled_tokens_are_logged_once,
    furnish_agent,
)
from tests.support.command_line import Call
from tests.support.user_run import assert_clean, call, call_here, furnish, steps

CALLERS = ["left", "main", "right"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    agent = furnish_agent(furnish(tmp_path_factory.mktemp("agent")))
    assert call(agent, "run", "config.toml") == 0, (agent / "said").read_text()
    return agent


def test_what_the_script_was_told_is_what_the_log_has_each_token_once(directory: Path) -> None:
    assert steps(directory, "tiny") == [0, 1]
    check_sampled_tokens_are_logged_once(directory)


def test_every_answer_stands_behind_its_prompt_in_a_context(directory: Path) -> None:
    check_answers_stand_behind_their_prompts(directory)


def test_calls_end_sampling_where_they_asked_for_it(directory: Path) -> None:
    check_calls_end_where_they_asked(directory)


def test_the_run_holds_and_is_made_again(directory: Path) -> None:
    assert_clean(directory, "tiny")
    assert call_here(directory, "replay", "tiny") == 0, (directory / "said").read_text()
    assert call_here(directory, "replay", "tiny", "--random", "4") == 0, (
        directory / "said"
    ).read_text()
    assert "4 of 4 trajectories bit-equal" in (directory / "said").read_text()


def _asked(call: Call, path: Path, *words: str) -> list[dict[str, Any]]:
    verb, *rest = words
    code, out, err = call(verb, path / "runs" / "tiny", *rest, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_the_table_of_calls_has_what_the_scripts_were_told(call: Call, directory: Path) -> None:
    sql = """select caller, count(*) as calls, sum(tokens) as tokens,
                    sum(prompt_tokens) as prompt, min(idle_ns) as idle
             from calls group by caller order by caller"""
    rows = _asked(call, directory, "sql", sql)
    heard = [entry for of in agent_calls(directory).values() for entry in of]
    assert [row["caller"] for row in rows] == CALLERS
    for row in rows:
        own = [entry for entry in heard if entry["who"] == row["caller"]]
        assert row["calls"] == len(own)
        assert row["tokens"] == sum(len(row["sampled"]) for row in own)
        assert row["prompt"] == sum(len(row["prompt"]) for row in own)
        assert row["idle"] >= 0


def test_show_and_its_trace_have_every_call(call: Call, directory: Path) -> None:
    sql = "select trajectory_id, contexts, calls from trajectories where calls > 0 limit 1"
    (row,) = _asked(call, directory, "sql", sql)
    (result,) = _asked(call, directory, "show", row["trajectory_id"])
    assert (len(result["contexts"]), len(result["calls"])) == (row["contexts"], row["calls"])
    assert sorted({row["caller"] for row in result["calls"]}) == CALLERS
    spans = [row for row in result["trace"] if row["stage"] == "chat"]
    assert len(spans) == row["calls"]
    assert all(span["lasted_s"] > 0 for span in spans)
    assert {row["context"] for row in result["segments"]} == set(range(row["contexts"]))
