"""Tests of exports: Parquet rows and model directories."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dora_pipe.audit import export
from dora_pipe.audit.export import JSON, ROW, TextColumns, export_parquet, export_policy
from dora_pipe.audit.ledger import Ledger
from dora_pipe.bus.base import ends_of, records_of
from dora_pipe.bus.logged import logged_trajectory
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.schemas.trajectory import Trajectory
from tests.golden import branched_values
from tests.support.branched_run import branch
from tests.support.command_line import Call, caller
from tests.support.ledgers import build_ledger
from tests.support.recorded_run import RecordedRun
from tests.support.tamper import Tamper


class Numbers:
    def text(self, token_ids: Sequence[int]) -> str:
        return self.full_text([token_id for token_id in token_ids if token_id])

    def full_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def trajectory(recorded: RecordedRun) -> Trajectory:
    with closing(recorded.open()) as bus:
        logged = build_ledger(bus, recorded.topics).accounts.logged
        for record in records_of(bus, ends_of(bus, recorded.topics.trajectories)):
            fact = logged[record.partition, record.offset].fact
            trajectory = logged_trajectory(record, fact)
            if len(trajectory.segments) > 1:
                return trajectory
    raise AssertionError("no trajectory has a segment of the model")


def types(texts: TextColumns) -> Mapping[str, pa.DataType]:
    return {field.name: field.type for field in texts.fields()}


def test_prompt_turns_and_answer_are_all_of_the_tokens_once(trajectory: Trajectory) -> None:
    texts = TextColumns(Numbers())
    columns = texts.columns(trajectory, types(texts))
    parts = [columns["prompt"], *(turn["text"] for turn in columns["turns"])]
    assert " ".join(parts) == " ".join(map(str, trajectory.token_ids))
    assert all(turn["kind"] != "prompt" for turn in columns["turns"])
    assert columns["answer"] == Numbers().text(
        [int(word) for word in columns["turns"][-1]["text"].split()]
    )


def test_a_turn_that_was_sampled_on_two_workers_is_one_text(trajectory: Trajectory) -> None:
    *first, last = trajectory.segments
    assert last.end - last.start > 1
    cut = last.start + 1
    pieces = (
        msgspec.structs.replace(last, end=cut),
        msgspec.structs.replace(last, start=cut, worker="other"),
    )
    moved = replace(trajectory, segments=(*first, *pieces))
    texts = TextColumns(Numbers())
    assert texts.columns(moved, {}) == texts.columns(trajectory, {})


def test_columns_of_the_data_have_the_type_of_their_values(trajectory: Trajectory) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(trajectory.meta.index)]
    rows += [{"n": 1, "x": 2, "s": "t", "b": True, "l": [1], "m": "a", "big": 2**80, "none": None}]
    rows += [{"x": 0.5, "m": 3, "late": "only here"}]
    texts = TextColumns(None, {trajectory.meta.dataset_digest: rows})
    kinds = {name.removeprefix(ROW): kind for name, kind in types(texts).items()}
    assert {kinds["n"], kinds["x"], kinds["s"], kinds["b"]} == {
        pa.int64(),
        pa.float64(),
        pa.utf8(),
        pa.bool_(),
    }
    assert kinds["l"] == kinds["m"] == kinds["big"] == JSON
    assert "none" not in kinds
    columns = texts.columns(trajectory, types(texts))
    assert (columns["row_l"], columns["row_m"], columns["row_big"]) == ("[1]", '"a"', str(2**80))
    assert "prompt" not in columns
    table = pa.Table.from_pylist([columns], schema=pa.schema(texts.fields()))
    assert table.to_pylist()[0]["row_x"] == 2.0


def test_other_data_gives_no_columns_for_a_trajectory(trajectory: Trajectory) -> None:
    texts = TextColumns(None, {"other": [{"a": 1}] * 1000})
    assert texts.columns(trajectory, types(texts)) == {}


def test_file_has_texts_beside_what_the_log_knows(recorded: RecordedRun, tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", TextColumns(Numbers())
    with closing(recorded.open()) as bus, closing(read_catalogue(bus, recorded.topics)) as tables:
        export_parquet(bus, recorded.topics, tables, recorded.store, path, texts=texts)
    for row in pq.read_table(path).to_pylist():
        assert row["prompt"].split() == [
            str(entry) for entry in row["token_ids"][: row["prompt_tokens"]]
        ]


def test_what_the_run_no_longer_has_is_null_and_said_in_one_line(
    copy: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call: Call = caller(monkeypatch, capsys)
    text = (copy.directory / "config.toml").read_text()
    assert 'kind = "' in text
    (copy.directory / "config.toml").write_text(
        text.replace('kind = "arithmetic"', 'kind = "gone:Task"')
    )
    code, _, err = call("export", "parquet", copy.directory, tmp_path / "a.parquet")
    assert code == 0, err
    notes = [line for line in err.splitlines() if line.startswith("note: columns of the data")]
    assert len(notes) == 1
    names = pq.read_schema(tmp_path / "a.parquet").names
    assert "prompt" in names
    assert not [name for name in names if name.startswith(ROW)]


def _rows(run: RecordedRun, path: Path, *, everything: bool = False) -> list[dict[str, Any]]:
    with closing(run.open()) as bus, closing(read_catalogue(bus, run.topics)) as tables:
        done = export_parquet(bus, run.topics, tables, run.store, path, everything=everything)
    table = pq.read_table(path)
    assert table.num_rows == done.rows
    assert done.bytes == path.stat().st_size
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _ledger(run: RecordedRun) -> Ledger:
    with closing(run.open()) as bus:
        return build_ledger(bus, run.topics)


def test_every_trajectory_that_counts_is_one_row(recorded: RecordedRun, tmp_path: Path) -> None:
    rows = _rows(recorded, tmp_path / "all.parquet")
    ledger = _ledger(recorded)
    trajectories = {
        logged.fact.trajectory
        for logged in ledger.accounts.logged.values()
        if logged.status == "bound"
    }
    assert {row["trajectory"] for row in rows} == trajectories
    assert len(rows) == len(trajectories)


def test_row_says_what_the_log_knows(recorded: RecordedRun, tmp_path: Path) -> None:
    rows = _rows(recorded, tmp_path / "all.parquet")
    ledger = _ledger(recorded)
    for row in rows:
        group = ledger.accounts.groups[row["group"]]
        assert row["outcome"] == group.outcome
        assert row["version"] == group.spec.version
        assert row["tokens"] == len(row["token_ids"]) == len(row["logprobs"])
        assert row["sampled"] == sum(row["loss_mask"])
        assert row["dispatched_ns"] <= row["scheduled_ns"] + 10**12
        if group.outcome == "trained":
            assert row["step"] == group.step
            assert row["staleness"] == row["step"] - row["version"] >= 0
            assert (row["advantage"] is None) == (row["reward"] is None)
            assert row["minibatch"] == 0
        else:
            assert row["step"] is row["advantage"] is row["minibatch"] is None
    assert {row["outcome"] for row in rows} == {"trained", "evaluated"}
    assert any(row["reward"] is None and row["reward_error"] for row in rows)
    assert max(row["attempts"] for row in rows) > 1, "what the catalogue alone has comes, too"


def test_records_that_do_not_count_come_when_asked_for(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    few = _rows(recorded, tmp_path / "few.parquet")
    many = _rows(recorded, tmp_path / "many.parquet", everything=True)
    assert {row["status"] for row in few} == {"bound"}
    fenced = [row for row in many if row["status"] == "fenced"]
    assert fenced
    assert all(row["step"] is None for row in fenced)


def test_rows_come_in_groups_of_a_bounded_size(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROWS_PER_GROUP", 50)
    monkeypatch.setattr(export, "STEPS_HELD_MAX", 1)
    rows = _rows(recorded, tmp_path / "all.parquet")
    file = pq.ParquetFile(tmp_path / "all.parquet")
    sizes = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    assert max(sizes) == 50
    assert sum(sizes) == len(rows)
    assert all(row["minibatch"] == 0 for row in rows if row["outcome"] == "trained")


def test_failed_export_leaves_nothing_behind(copy: RecordedRun, tmp_path: Path) -> None:
    with Tamper(copy) as log:
        _, fact = log.facts(StepCommitted)[3]
    (copy.store / "contributions" / f"{fact.contributions.sha256}.arrow").unlink()
    folder = tmp_path / "out"
    folder.mkdir()
    with pytest.raises(PolicyError, match="no contributions of step 3"):
        _rows(copy, folder / "all.parquet")
    assert list(folder.iterdir()) == []


def test_version_that_was_not_published_is_refused(recorded: RecordedRun, tmp_path: Path) -> None:
    with (
        closing(recorded.open()) as bus,
        closing(read_catalogue(bus, recorded.topics)) as tables,
        pytest.raises(UsageError, match="version 99 was not published") as refused,
    ):
        export_policy(tables, recorded.store, 99, tmp_path / "out")
    assert refused.value.hint == "there are versions 0 to 14"


def test_policy_is_exported_with_its_digest(recorded: RecordedRun, tmp_path: Path) -> None:
    with closing(recorded.open()) as bus, closing(read_catalogue(bus, recorded.topics)) as tables:
        digest = export_policy(tables, recorded.store, 5, tmp_path / "out")
    assert digest == _ledger(recorded).versions[5].digest
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_texts_of_an_agent_say_their_context_and_the_answer_is_that_of_the_last_call() -> None:
    entry = branched_values.branched(calls=(branched_values.CALL,))
    texts = TextColumns(Numbers())
    columns = texts.columns(entry, types(texts))
    assert columns["prompt"] == "0 1 2"
    assert [(turn["kind"], turn["context"], turn["text"]) for turn in columns["turns"]] == [
        *(("model", 0, "3 4"), ("environment", 0, "5"), ("model", 0, "6 7")),
        *(("prompt", 1, "8 9"), ("model", 1, "10 11")),
        ("model", 2, "12"),
        *(("prompt", 3, "13"), ("model", 3, "14 15")),
    ]
    assert columns["answer"] == "3 4"


def test_file_has_where_contexts_branch(copy: RecordedRun, tmp_path: Path) -> None:
    with Tamper(copy) as log:
        name = branch(log)
    with closing(copy.open()) as bus, closing(read_catalogue(bus, copy.topics)) as tables:
        export_parquet(bus, copy.topics, tables, copy.store, tmp_path / "a.parquet")
    rows = {row["trajectory"]: row for row in pq.read_table(tmp_path / "a.parquet").to_pylist()}
    assert rows[name]["branches"] == [
        {"start": 22, "parent": -1, "shared": 0},
        {"start": 33, "parent": 0, "shared": 6},
        {"start": 37, "parent": 2, "shared": 9},
    ]
    assert (rows[name]["contexts"], rows[name]["calls"]) == (4, 5)
    assert all(row["branches"] == [] for other, row in rows.items() if other != name)
