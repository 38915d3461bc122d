"""Columns that people read: texts of a trajectory, and the row of data that it is of."""

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

from dora_pipe.audit.auditor import build_ledger
from dora_pipe.audit.export import JSON, ROW, Texts, export_parquet
from dora_pipe.audit.reading import ends_of, records_of
from dora_pipe.bus.logged import logged_trajectory
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.command_line import Call, caller
from tests.support.recorded_run import RecordedRun, recorded_in


class Numbers:
    """Token ids as their numbers; 0 is special."""

    def text(self, token_ids: Sequence[int]) -> str:
        return self.full_text([one for one in token_ids if one])

    def full_text(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return recorded_in(tmp_path_factory.getbasetemp())


@pytest.fixture
def trajectory(recorded: RecordedRun) -> Trajectory:
    """One that has two segments at least."""
    bus = recorded.open()
    try:
        logged = build_ledger(bus, recorded.topics).accounts.logged
        for record in records_of(bus, ends_of(bus, recorded.topics.trajectories)):
            fact = logged[record.partition, record.offset].fact
            found = logged_trajectory(record, fact)
            if len(found.segments) > 1:
                return found
    finally:
        bus.close()
    raise AssertionError("no trajectory has a segment of the model")


def types(texts: Texts) -> Mapping[str, pa.DataType]:
    return {one.name: one.type for one in texts.fields()}


def test_prompt_turns_and_answer_are_all_of_the_tokens_once(trajectory: Trajectory) -> None:
    texts = Texts(Numbers())
    found = texts.columns(trajectory, types(texts))
    parts = [found["prompt"], *(turn["text"] for turn in found["turns"])]
    assert " ".join(parts) == " ".join(map(str, trajectory.token_ids))
    assert all(turn["kind"] != "prompt" for turn in found["turns"])
    assert found["answer"] == Numbers().text(
        [int(one) for one in found["turns"][-1]["text"].split()]
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
    texts = Texts(Numbers())
    assert texts.columns(moved, {}) == texts.columns(trajectory, {})


def test_columns_of_the_data_have_the_type_of_their_values(trajectory: Trajectory) -> None:
    rows: list[dict[str, Any]] = [{} for _ in range(trajectory.meta.index)]
    rows += [{"n": 1, "x": 2, "s": "t", "b": True, "l": [1], "m": "a", "big": 2**80, "none": None}]
    rows += [{"x": 0.5, "m": 3, "late": "only here"}]
    texts = Texts(None, {trajectory.meta.dataset_digest: rows})
    kinds = {name.removeprefix(ROW): kind for name, kind in types(texts).items()}
    assert {kinds["n"], kinds["x"], kinds["s"], kinds["b"]} == {
        pa.int64(),
        pa.float64(),
        pa.utf8(),
        pa.bool_(),
    }
    assert kinds["l"] == kinds["m"] == kinds["big"] == JSON
    assert "none" not in kinds
    found = texts.columns(trajectory, types(texts))
    assert (found["row_l"], found["row_m"], found["row_big"]) == ("[1]", '"a"', str(2**80))
    assert "prompt" not in found
    table = pa.Table.from_pylist([found], schema=pa.schema(texts.fields()))
    assert table.to_pylist()[0]["row_x"] == 2.0


def test_other_data_gives_no_columns_for_a_trajectory(trajectory: Trajectory) -> None:
    texts = Texts(None, {"other": [{"a": 1}] * 1000})
    assert texts.columns(trajectory, types(texts)) == {}


def test_file_has_texts_beside_what_the_log_knows(recorded: RecordedRun, tmp_path: Path) -> None:
    path, texts = tmp_path / "a.parquet", Texts(Numbers())
    with (
        closing(recorded.open()) as bus,
        closing(read_catalogue(bus, recorded.topics)) as tables,
    ):
        export_parquet(bus, recorded.topics, tables, recorded.store, path, texts=texts)
    for row in pq.read_table(path).to_pylist():
        assert row["prompt"].split() == [
            str(one) for one in row["token_ids"][: row["prompt_tokens"]]
        ]


def test_what_the_run_no_longer_has_is_null_and_said_in_one_line(
    recorded: RecordedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    call: Call = caller(monkeypatch, capsys)
    copy = recorded.copy(tmp_path / "copy")
    text = (copy.directory / "config.toml").read_text()
    assert 'kind = "' in text
    (copy.directory / "config.toml").write_text(
        text.replace('kind = "arithmetic"', 'kind = "gone:Task"')
    )
    code, _, err = call("export", copy.directory, "--parquet", tmp_path / "a.parquet")
    assert code == 0, err
    notes = [line for line in err.splitlines() if line.startswith("note: columns of the data")]
    assert len(notes) == 1
    names = pq.read_schema(tmp_path / "a.parquet").names
    assert "prompt" in names
    assert not [name for name in names if name.startswith(ROW)]
