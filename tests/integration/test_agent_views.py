"""Tests of all views of a run whose rollouts are a script with the package `openai`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.integration.test_agent_runs import directory
from tests.support.agent_run import agent_calls
from tests.support.command_line import Call

__all__ = ["directory"]

pytestmark = pytest.mark.slow  # a run of its own

CALLERS = ["left", "main", "right"]


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
