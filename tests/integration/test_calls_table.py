"""The table of agents' calls: read from records when a statement names it, and only then."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.support.branched_run import ASKED, CONTEXTS, branch
from tests.support.command_line import Call
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Row, Tamper


@pytest.fixture
def branched(copy: RecordedRun) -> tuple[RecordedRun, str]:
    with Tamper(copy) as log:
        return copy, branch(log)


def test_calls_of_records_are_rows_with_context_prompt_and_caller(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, name = branched
    sql = """select call, context, prompt_tokens, tokens, caller, occurrence, ignored_settings,
                    (answered_ns - asked_ns) / 1e6 as ms, trajectory_id from calls order by call"""
    for _ in range(2):  # from the log, and from the tables that were kept
        code, out, err = call("sql", run.directory, sql, "--json")
        assert code == 0, err
        rows = [json.loads(line) for line in out.splitlines()]
        assert {row.pop("trajectory_id") for row in rows} == {name}
        assert [list(row.values()) for row in rows] == [
            [0, 0, 6, 5, "planner", 0, None, 38.0],
            [1, 2, 6, 4, "planner", 1, None, 30.0],
            [2, 1, 5, 6, "searcher", 0, '{"temperature":0.5}', 50.0],
            [3, 0, 15, 7, "planner", 0, None, 40.0],
            [4, 3, 12, 5, None, 0, None, 30.0],
        ]


def test_trajectories_say_how_many_contexts_and_calls_they_have(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, _ = branched
    sql = "select contexts, calls, count(*) as n from trajectories where tokens > 0 group by all"
    code, out, err = call("sql", run.directory, f"{sql} order by calls desc", "--json")
    assert code == 0, err
    first, rest = (json.loads(line) for line in out.splitlines())
    assert first == {"contexts": 1 + len(CONTEXTS), "calls": len(ASKED), "n": 1}
    assert (rest["contexts"], rest["calls"]) == (1, 0)


def test_a_query_of_the_column_calls_opens_no_record(
    call: Call, branched: tuple[RecordedRun, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora_pipe.ledger.calls.view_trajectory", None)
    code, out, err = call("sql", branched[0].directory, "select max(calls) as n from trajectories")
    assert (code, out.split()) == (0, ["n", str(len(ASKED))]), err


def test_a_damaged_record_is_named_and_its_calls_are_missing(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, name = branched
    with Tamper(run) as log:
        (row,) = [row for row in log.rows("trajectories") if row.key and _is(row, name)]
        log.put(replace(row, value=row.value[:-1]))
    code, out, err = call("sql", run.directory, "select count(*) as n from calls")
    assert (code, out.split()) == (5, ["n", "0"]), err
    assert "their calls are not in the table" in err


def test_audit_holds_the_counts_against_the_record(
    call: Call, branched: tuple[RecordedRun, str]
) -> None:
    run, name = branched
    with Tamper(run) as log:
        (report,) = [fact for fact in log.logged() if fact[3].trajectory == name and fact[3].calls]
        log.log_otherwise(*report[:3], calls=len(ASKED) + 1)
        log.mend()
    code, out, _ = call("audit", run.directory, "--no-store")
    assert code == 5
    assert "calls in the record differs from `trajectory logged`" in out


def _is(row: Row, name: str) -> bool:
    return dict(row.headers).get("trajectory") == name.encode()
