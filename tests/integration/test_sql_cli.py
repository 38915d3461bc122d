"""`sql` as a user calls it, and the questions that its page answers."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path

import duckdb
import pytest

from dora_pipe.ledger.calls import ask
from dora_pipe.ledger.database import VIEWS
from dora_pipe.ledger.reading import FILE, read_catalogue
from dora_pipe.ledger.tables import CALLS, TABLES, columns_of
from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in

PAGE = (Path(__file__).parents[2] / "docs/reference/catalogue.md").read_text()
QUESTIONS = dict(re.findall(r"^([^\n]+\?)\n\n```sql\n(.*?)\n```$", PAGE, re.M | re.S))
"""What people ask, with the statement that answers it."""

NOT_IN_THIS_RUN = {
    "Which rows of the data never get a reward?",
    "Which rows are always solved, so that they teach nothing?",
    "What was sampled and not trained?",
    "Which errors do requests end with?",
    "Which groups come first where batches are taken in parts: shorter ones, better ones?",
    "Which parts of batches went ahead, and what did each wait for?",
    "How long does an agent think between two calls, and how long does it wait for answers?",
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, as a copy: its catalogue is written beside it."""
    found = recorded_in(tmp_path_factory.getbasetemp())
    return found.copy(tmp_path_factory.mktemp("sql") / "recorded")


def test_a_query_prints_a_table_and_keeps_the_catalogue(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("sql", str(recorded.directory), "select count(*) as steps from steps")
    assert (code, out.split()) == (0, ["steps", str(STEPS)]), err
    assert (recorded.directory / FILE).is_file()


def test_json_has_an_object_a_row(call: Call, recorded: RecordedRun) -> None:
    sql = "select fate, count(*) as groups, 1.5 as half from groups group by fate"
    code, out, _ = call("sql", str(recorded.directory), sql, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert {"trained", "evaluated"} <= {row["fate"] for row in rows}
    assert all(row["half"] == 1.5 for row in rows)


def test_without_a_query_the_tables_are_listed(call: Call, recorded: RecordedRun) -> None:
    code, out, _ = call("sql", str(recorded.directory), "--json")
    names = {json.loads(line)["table"] for line in out.splitlines()}
    assert code == 0
    assert {"steps", "groups", "trajectories", "attempts"} <= names


def test_a_query_that_is_wrong_is_one_line_and_a_hint(call: Call, recorded: RecordedRun) -> None:
    code, out, err = call("sql", str(recorded.directory), "select reward from stepz")
    assert (code, out) == (2, "")
    assert "stepz" in err and "hint: docs/reference/catalogue.md" in err
    _, _, err = call("sql", str(recorded.directory), "select reward_mean from steps")
    assert 'Candidate bindings: "reward' in err and "LINE" not in err


def test_the_page_has_every_table_column_and_view() -> None:
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^#|\Z)", PAGE, re.M | re.S))
    assert sections.keys() == {table.name for table in (*TABLES, CALLS)} | VIEWS.keys()
    for table in (*TABLES, CALLS):
        listed = re.findall(r"^\| `(\w+)` \|", sections[table.name], re.M)
        assert listed == [column.name for column in columns_of(table.row)]


@pytest.mark.parametrize("question", QUESTIONS)
def test_every_question_of_the_page_is_answered(question: str, recorded: RecordedRun) -> None:
    with (
        closing(recorded.open()) as bus,
        closing(read_catalogue(bus, recorded.topics)) as catalogue,
    ):
        names, rows, _ = ask(catalogue, bus, recorded.topics, QUESTIONS[question])
    assert names
    assert rows or question in NOT_IN_THIS_RUN


def test_audit_holds_the_kept_tables_against_its_own_account(
    call: Call, recorded: RecordedRun
) -> None:
    call("sql", str(recorded.directory), "select 1")
    code, out, err = call("audit", str(recorded.directory), "--no-store")
    assert code == 0, out + err
    assert re.search(r"^catalogue +the tables .* ok$", out, re.MULTILINE)
    with closing(duckdb.connect(str(recorded.directory / FILE))) as tables:
        tables.execute("update groups_ended set fate = 'filtered' where group_id = 'g0000000000'")
    code, out, _ = call("audit", str(recorded.directory), "--no-store")
    assert code == 5
    assert "the catalogue beside the run was changed" in out
    (recorded.directory / FILE).unlink()
    assert call("audit", str(recorded.directory), "--no-store")[0] == 0
