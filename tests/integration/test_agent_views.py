"""Tests of all views of a run whose rollouts are a script with the package `openai`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.integration.test_agent_runs import place
from tests.support.agent_run import told
from tests.support.command_line import Call

__all__ = ["place"]

pytestmark = pytest.mark.slow  # a run of its own

CALLERS = ["left", "main", "right"]


def _asked(call: Call, place: Path, *words: str) -> list[dict[str, Any]]:
    verb, *rest = words
    code, out, err = call(verb, place / "runs" / "tiny", *rest, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_the_table_of_calls_has_what_the_scripts_were_told(call: Call, place: Path) -> None:
    sql = """select caller, count(*) as calls, sum(tokens) as tokens,
                    sum(prompt_tokens) as prompt, min(idle_ns) as idle
             from calls group by caller order by caller"""
    rows = _asked(call, place, "sql", sql)
    heard = [one for of in told(place).values() for one in of]
    assert [row["caller"] for row in rows] == CALLERS
    for row in rows:
        own = [one for one in heard if one["who"] == row["caller"]]
        assert row["calls"] == len(own)
        assert row["tokens"] == sum(len(one["sampled"]) for one in own)
        assert row["prompt"] == sum(len(one["prompt"]) for one in own)
        assert row["idle"] >= 0


def test_show_and_its_trace_have_every_call(call: Call, place: Path) -> None:
    sql = "select trajectory_id, contexts, calls from trajectories where calls > 0 limit 1"
    (row,) = _asked(call, place, "sql", sql)
    (found,) = _asked(call, place, "show", row["trajectory_id"])
    assert (len(found["contexts"]), len(found["calls"])) == (row["contexts"], row["calls"])
    assert sorted({one["caller"] for one in found["calls"]}) == CALLERS
    spans = [one for one in found["trace"] if one["stage"] == "chat"]
    assert len(spans) == row["calls"]
    assert all(one["lasted_s"] > 0 for one in spans)
    assert {one["context"] for one in found["segments"]} == set(range(row["contexts"]))


def test_a_file_of_its_pages_draws_the_trees(call: Call, place: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.html"
    code, _, err = call("export", "html", place / "runs" / "tiny", path)
    assert code == 0, err
    inside = path.read_text().partition('id="data">')[2].partition("</script>")[0]
    pages = json.loads(inside)["pages"]
    trees = [one["record"]["tree"] for name, one in pages.items() if name.startswith("trajectory/")]
    assert trees
    for tree in trees:
        assert sorted({row[2] for row in tree["calls"]["rows"]}) == CALLERS
        assert len(tree["contexts"]) >= 3
