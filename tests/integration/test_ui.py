"""Tests of the pages of an eventful run: links, hidden fields, live updates and the export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dora_pipe.core.errors import UsageError
from dora_pipe.ledger.reading import FILE
from dora_pipe.observe.web.overview import overview
from dora_pipe.observe.web.pages import (
    group_page,
    step_page,
    token_texts,
    trajectory_page,
    version_page,
)
from dora_pipe.observe.web.query_worker import QueryWorker
from dora_pipe.observe.web.samples import mismatch, texts
from dora_pipe.observe.web.view import HIDDEN, RunSource, RunView, parse_query
from tests.support.cluster import Cluster, make_config
from tests.support.command_line import Call
from tests.support.recorded_run import STEPS, RecordedRun, recorded_in
from tests.support.ui_stage import read_all, source_of, view_of_log

LIMIT_BYTES = 10_000_000


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    result = recorded_in(tmp_path_factory.getbasetemp())
    return result.copy(tmp_path_factory.mktemp("ui") / "recorded")


@pytest.fixture(scope="module")
def source(recorded: RecordedRun) -> Iterator[RunSource]:
    with source_of(
        recorded, decode=lambda ids: "".join(f"<{token_id}>" for token_id in ids)
    ) as source:
        yield source


@pytest.fixture(scope="module")
def view(source: RunSource) -> Iterator[RunView]:
    with view_of_log(source) as result:
        yield result


def test_overview_has_every_step_and_every_group(view: RunView) -> None:
    actual_overview = overview(view)
    assert actual_overview["run"]["state"] == "finished"
    points = actual_overview["points"]
    assert points["step"] == list(range(STEPS))
    assert max(points["stale_high"]) <= max(points["bound"])
    totals = actual_overview["totals"]
    assert sum(totals["outcomes"].values()) + totals["open"] == view.value(
        "select count(*) from groups"
    )
    assert {row["worker"] for row in actual_overview["timeline"]["rows"]} == {"w0", "w1", "w2"}
    assert totals["not_counting"] > 0
    assert len(msgspec.json.encode(actual_overview)) < 200_000


def _group_of_step(view: RunView, step: int) -> str:
    sql = "select group_id from groups where step = ? and outcome = 'trained' order by group_id"
    return str(view.value(sql, step))


def test_lineage_leads_from_a_trajectory_to_its_step_and_back(
    view: RunView, source: RunSource
) -> None:
    name = _group_of_step(view, 5)
    sample = f"{name}-000"
    page = trajectory_page(view, source, parse_query(f"/trajectory/{sample}"))
    assert page["lineage"]["step"] == 5
    step = step_page(view, source, parse_query("/step/5"))
    assert name in [row["group"] for row in step["sections"]["groups"]]
    version = version_page(view, source, parse_query(f"/version/{page['lineage']['version']}"))
    assert 5 in dict(version["steps"])
    group = group_page(view, source, parse_query(f"/group/{name}"))
    assert group["lineage"] == page["lineage"]


def test_words_of_a_tokenizer_stand_apart_as_it_would_write_them() -> None:
    words = {1: "a", 2: "b", 3: ""}
    texts = token_texts(
        lambda ids: " ".join(words[token_id] for token_id in ids), [1, 2, 2, 3], 1, 4
    )
    assert texts == [" b", " b", " "]
    halves = {(1,): "\ufffd", (2,): "\ufffd", (1, 2): "é"}
    texts = token_texts(lambda ids: halves.get(tuple(ids), ""), [1, 2], 0, 2)
    assert texts == ["\ufffd", "\ufffd"]


def test_tokens_have_what_the_log_has_of_each(view: RunView, source: RunSource) -> None:
    name = f"{_group_of_step(view, 3)}-000"
    record = trajectory_page(view, source, parse_query(f"/trajectory/{name}"))["record"]
    tokens = record["tokens"]
    assert {len(tokens[entry]) for entry in ("ids", "text", "mask", "logprob", "sampler")} == {
        tokens["total"]
    }
    assert tokens["text"][0] == f"<{tokens['ids'][0]}>"
    assert [token is not None for token in tokens["logprob"]] == [
        bool(token) for token in tokens["mask"]
    ]
    part = trajectory_page(view, source, parse_query(f"/trajectory/{name}?from=2"))["record"]
    assert part["tokens"]["ids"] == tokens["ids"][2:]


def test_redaction_hides_ids_texts_and_what_tasks_said(
    view: RunView, recorded: RecordedRun, source: RunSource
) -> None:
    invalid = view.value(
        """select trajectory_id from trajectories
           where record_offset is not null and reward is null order by trajectory_id"""
    )
    asked = parse_query(f"/trajectory/{invalid}")
    shown = trajectory_page(view, source, asked)
    with source_of(recorded, redact=True, decode=lambda ids: "secret") as hiding:
        hidden = trajectory_page(view, hiding, asked)
    error = shown["sections"]["result"]["reward error"]
    assert error not in (None, HIDDEN)
    assert hidden["sections"]["result"]["reward error"] == HIDDEN
    assert hidden["record"]["tokens"]["ids"] is None
    assert hidden["record"]["tokens"]["text"] is None
    assert hidden["record"]["tokens"]["logprob"] == shown["record"]["tokens"]["logprob"]
    assert "secret" not in json.dumps(hidden)
    assert error not in json.dumps(hidden)


@pytest.mark.parametrize(
    ("address", "page"),
    [
        ("/step/999", step_page),
        ("/step/x", step_page),
        ("/group/g0000099999", group_page),
        ("/trajectory/g0000099999-000", trajectory_page),
        ("/version/999", version_page),
    ],
)
def test_what_is_not_there_is_a_line(
    view: RunView, source: RunSource, address: str, page: Any
) -> None:
    with pytest.raises(UsageError):
        page(view, source, parse_query(address))


def test_mismatch_and_excerpts_come_from_contributions_and_records(
    view: RunView, source: RunSource
) -> None:
    actual_mismatch = mismatch(view, source)
    assert actual_mismatch["looked"] == actual_mismatch["steps"] == STEPS
    prompt, response = texts(view, source, parse_query("/texts?step=3"))[
        f"{_group_of_step(view, 3)}-000"
    ]
    assert prompt.startswith("<") and response.startswith("<")


def test_desk_answers_while_it_reads_and_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    config = make_config(run__steps=6, run__name="living")
    with Cluster(tmp_path, config) as cluster:
        cluster.until(lambda: cluster.version >= 2)
        recorded = RecordedRun(directory=tmp_path, run="living")
        worker = QueryWorker(lambda: source_of(recorded))
        try:
            worker.start()
            assert worker.ask(parse_query("/run"))["name"] == "living"
            read_all(worker)
            before = worker.ask(parse_query("/overview"))
            assert (before["run"]["state"], before["run"]["read"]) == ("open", 1.0)
            cluster.until(lambda: cluster.version >= 4)
            _until_steps(worker, 4)
            cluster.run()
            _until_steps(worker, 6)
            after = worker.ask(parse_query("/overview"))
            assert after["run"]["state"] == "finished"
            assert len(after["points"]["step"]) == 6
        finally:
            worker.close()


def _until_steps(worker: QueryWorker, steps: int) -> None:
    for _ in range(2000):
        worker._looked_s = 0.0
        if worker.ask(parse_query("/run"))["steps"] >= steps:
            return
    pytest.fail(f"the worker never saw {steps} steps")


def test_desk_says_why_a_log_cannot_be_opened(tmp_path: Path) -> None:
    def no_log() -> Any:
        raise UsageError("there is none")

    with pytest.raises(UsageError):
        QueryWorker(no_log)


def test_tables_of_a_finished_run_are_kept_and_opened_without_its_log(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / FILE
    answers = []
    for _ in range(2):
        worker = QueryWorker(lambda: source_of(recorded, catalogue=path))
        with closing(worker):
            read_all(worker)
            answers.append(worker.ask(parse_query("/overview")))
            while not path.is_file():
                read_all(worker)
        monkeypatch.setattr("dora_pipe.observe.web.query_worker.LivingCatalogue", None)
    first, second = ({**answer, "run": {**answer["run"], "revision": 0}} for answer in answers)
    assert first == second


@pytest.mark.parametrize(
    ("words", "text"), [(("nothing",), "no run"), (("--port", "99999"), "--port")]
)
def test_what_cannot_be_shown_is_one_line(
    call: Call, recorded: RecordedRun, words: tuple[str, ...], text: str
) -> None:
    run = [] if words == ("nothing",) else [recorded.directory]
    code, _, err = call("ui", *run, *words)
    assert (code, text in err) == (2, True), err
