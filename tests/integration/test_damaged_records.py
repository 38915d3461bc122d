"""Tests of every reader of records on a removed, changed or exchanged record."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dora_pipe.audit.replay_trajectory import engines_of
from dora_pipe.consumers.trainer.batch_reader import batch_of_commit
from dora_pipe.core.errors import InvariantBroken
from dora_pipe.core.system.clock import SystemClock
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.traces import names
from dora_pipe.observe.web import samples
from dora_pipe.observe.web.pages import trajectory_page
from dora_pipe.observe.web.view import parse_query
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.identity import group_of
from tests.support import damage
from tests.support.command_line import Call, caller
from tests.support.otlp_endpoint import OtlpEndpoint
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper
from tests.support.ui_stage import source_of, view_of_log


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    return caller(monkeypatch, capsys)


def _swap(log: Tamper) -> str:
    (row, fact), (other, _) = log.trained(40), log.trained(41)
    log.put(replace(row, value=other.value, headers=other.headers, key=other.key))
    log.put(replace(other, value=row.value, headers=row.headers, key=row.key))
    return fact.trajectory


DAMAGES: dict[str, tuple[Callable[[Tamper], str], str]] = {
    "gone": (damage.remove_trajectory, "its record is missing at trajectories:"),
    "swapped": (_swap, "is not the one that was logged: sha256"),
}


@pytest.fixture(params=DAMAGES)
def damaged(copy: RecordedRun, request: pytest.FixtureRequest) -> tuple[RecordedRun, str, str]:
    damaging, text = DAMAGES[request.param]
    with Tamper(copy) as log:
        return copy, damaging(log), text


def test_show_says_so_and_ends_with_exit_code_5(
    call: Call, damaged: tuple[RecordedRun, str, str]
) -> None:
    run, name, text = damaged
    code, out, err = call("show", str(run.directory), name, "--json")
    assert code == 5
    assert f"error: {name}: " in err and text in err
    description = json.loads(out)
    (bound,) = [row for row in description["records"] if row["status"] == "bound"]
    assert text in bound["comparison"]
    assert "segments" not in description


def test_export_leaves_it_out_by_name_and_ends_with_exit_code_5(
    call: Call, damaged: tuple[RecordedRun, str, str], tmp_path: Path
) -> None:
    run, name, text = damaged
    file = tmp_path / "x.parquet"
    code, _, err = call("export", "parquet", str(run.directory), str(file))
    assert code == 5
    assert any(line.startswith(f"{name}: ") and text in line for line in err.splitlines()), err
    written = set(pq.read_table(file)["trajectory"].to_pylist())
    assert name not in written and len(written) > 200


def test_group_with_a_damaged_sample_says_so(
    call: Call, damaged: tuple[RecordedRun, str, str]
) -> None:
    run, name, text = damaged
    code, _, err = call("show", str(run.directory), group_of(name), "--json")
    assert code == 5
    assert f"error: {name}: " in err and text in err


@pytest.mark.parametrize("words", [(), ("--follow",)], ids=["whole", "follow"])
def test_traces_tell_of_it_by_facts_alone_and_end_with_exit_code_5(
    call: Call, damaged: tuple[RecordedRun, str, str], words: tuple[str, ...]
) -> None:
    run, name, text = damaged
    with OtlpEndpoint() as endpoint:
        code, _, err = call("export", "traces", str(run.directory), endpoint.address, *words)
        own = [span for span in endpoint.spans if span.attributes.get(names.TRAJECTORY) == name]
        full = {span.attributes.get(names.TRAJECTORY) for span in endpoint.spans}
    assert code == 5
    assert any(line.startswith(f"{name}: ") and text in line for line in err.splitlines()), err
    assert "damaged, their traces contain events only" in err
    assert own and not any(span.stage == "segment" for span in own)
    assert len(full) > 200, "the sound ones were sent"


def test_excerpts_come_from_sound_records(damaged: tuple[RecordedRun, str, str]) -> None:
    run, name, _ = damaged
    asked = parse_query(f"/texts?q={group_of(name)}")
    with source_of(run, decode=str) as source, view_of_log(source) as view:
        texts = samples.texts(view, source, asked)
    assert name not in texts
    assert all(prompt and response for prompt, response in texts.values())


def test_regeneration_does_not_take_another_record_for_it(
    damaged: tuple[RecordedRun, str, str],
) -> None:
    run, name, text = damaged
    with (
        closing(run.open()) as bus,
        closing(read_catalogue(bus, run.topics)) as tables,
        pytest.raises(InvariantBroken, match=name) as caught,
    ):
        engines_of(bus, run.topics, tables, [name])
    assert text in caught.value.message


def test_batch_that_is_measured_is_the_one_that_was_trained(copy: RecordedRun) -> None:
    with Tamper(copy) as log:
        name = damage.change_token_and_record(log)
        commits = [fact for _, fact in log.facts(StepCommitted)]
    commit = next(
        commit
        for commit in commits
        for group in commit.groups
        if name in [taken.trajectory for taken in group.trajectories]
    )
    bus = copy.open()
    try:
        with pytest.raises(InvariantBroken, match=f"{name} differs from the trained record"):
            batch_of_commit(bus, copy.topics, commit, clock=SystemClock())
    finally:
        bus.close()


def test_page_of_a_trajectory_says_why_it_has_no_record(
    damaged: tuple[RecordedRun, str, str],
) -> None:
    run, name, text = damaged
    with source_of(run) as source, view_of_log(source) as view:
        page = trajectory_page(view, source, parse_query(f"/trajectory/{name}"))
    assert text in page["record"]["missing"]
