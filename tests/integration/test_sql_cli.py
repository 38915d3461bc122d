"""`sql` as a user calls it, and the questions that its page answers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dora_pipe.ledger.database import VIEWS
from dora_pipe.ledger.reading import FILE
from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in

PAGE = (Path(__file__).parents[2] / "docs/reference/sql.md").read_text()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    result = recorded_in(tmp_path_factory.getbasetemp())
    return result.copy(tmp_path_factory.mktemp("sql") / "recorded")


def test_a_query_prints_a_table_and_keeps_the_catalogue(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("sql", str(recorded.directory), "select count(*) as steps from steps")
    assert (code, out.split()) == (0, ["steps", str(STEPS)]), err
    assert (recorded.directory / FILE).is_file()


def test_json_has_an_object_a_row(call: Call, recorded: RecordedRun) -> None:
    sql = "select outcome, count(*) as groups, 1.5 as half from groups group by outcome"
    code, out, _ = call("sql", str(recorded.directory), sql, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {"trained", "evaluated"} <= {row["outcome"] for row in rows}
    assert all(row["half"] == 1.5 for row in rows)


def test_without_a_query_the_tables_are_listed(call: Call, recorded: RecordedRun) -> None:
    code, out, _ = call("sql", str(recorded.directory), "--json")
    names = {json.loads(line)["table"] for line in out.splitlines()}
    assert code == 0
    assert {"steps", "groups", "trajectories", "attempts"} <= names


def test_a_query_that_is_wrong_is_one_line_and_a_hint(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("sql", str(recorded.directory), "select reward from stepz")
    assert (code, out) == (2, "")
    assert "stepz" in err and "hint: docs/reference/sql.md" in err
    _, _, err = call("sql", str(recorded.directory), "select reward_mean from steps")
    assert 'Candidate bindings: "reward' in err and "LINE" not in err


def test_the_page_has_every_view() -> None:
    views = PAGE.partition("## Views")[2].partition("## Tables")[0]
    assert re.findall(r"^### (\w+)$", views, re.M) == list(VIEWS)
