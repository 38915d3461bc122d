"""What other tools get: one Parquet row per trajectory, a policy as a model directory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dora_pipe.audit import export
from dora_pipe.audit.audit import build_ledger
from dora_pipe.audit.export import export_parquet, export_policy
from dora_pipe.audit.ledger import Ledger
from dora_pipe.catalogue.reading import read_catalogue
from dora_pipe.core.errors import PolicyError, UsageError
from dora_pipe.schemas.control import StepCommitted
from tests.support.recorded_run import RecordedRun, recorded_in
from tests.support.tamper import Tamper


@pytest.fixture
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    """The session's run, not to be changed."""
    return recorded_in(tmp_path_factory.getbasetemp())


def _rows(run: RecordedRun, path: Path, *, everything: bool = False) -> list[dict[str, Any]]:
    bus = run.open()
    try:
        with closing(read_catalogue(bus, run.topics)) as tables:
            done = export_parquet(bus, run.topics, tables, run.store, path, everything=everything)
    finally:
        bus.close()
    table = pq.read_table(path)
    assert table.num_rows == done.rows
    assert done.bytes == path.stat().st_size
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def _ledger(run: RecordedRun) -> Ledger:
    bus = run.open()
    try:
        return build_ledger(bus, run.topics)
    finally:
        bus.close()


def test_every_trajectory_that_counts_is_one_row(recorded: RecordedRun, tmp_path: Path) -> None:
    rows = _rows(recorded, tmp_path / "all.parquet")
    ledger = _ledger(recorded)
    wanted = {
        one.fact.trajectory for one in ledger.accounts.logged.values() if one.standing == "bound"
    }
    assert {row["trajectory"] for row in rows} == wanted
    assert len(rows) == len(wanted)


def test_row_says_what_the_log_knows(recorded: RecordedRun, tmp_path: Path) -> None:
    rows = _rows(recorded, tmp_path / "all.parquet")
    ledger = _ledger(recorded)
    for row in rows:
        group = ledger.accounts.groups[row["group"]]
        assert row["fate"] == group.fate
        assert row["version"] == group.spec.version
        assert row["tokens"] == len(row["token_ids"]) == len(row["logprobs"])
        assert row["sampled"] == sum(row["loss_mask"])
        assert row["dispatched_ns"] <= row["placed_ns"] + 10**12
        if group.fate == "trained":
            assert row["step"] == group.step
            assert row["staleness"] == row["step"] - row["version"] >= 0
            assert (row["advantage"] is None) == (row["reward"] is None)
            assert row["minibatch"] == 0
        else:
            assert row["step"] is row["advantage"] is row["minibatch"] is None
    assert {row["fate"] for row in rows} == {"trained", "evaluated"}
    assert any(row["reward"] is None and row["reward_error"] for row in rows)


def test_records_that_do_not_count_come_when_asked_for(
    recorded: RecordedRun, tmp_path: Path
) -> None:
    few = _rows(recorded, tmp_path / "few.parquet")
    many = _rows(recorded, tmp_path / "many.parquet", everything=True)
    assert {row["standing"] for row in few} == {"bound"}
    fenced = [row for row in many if row["standing"] == "fenced"]
    assert fenced
    assert all(row["step"] is None for row in fenced)


def test_rows_come_in_groups_of_a_bounded_size(
    recorded: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "ROWS_PER_GROUP", 50)
    monkeypatch.setattr(export, "STEPS_HELD_MAX", 1)
    rows = _rows(recorded, tmp_path / "all.parquet")
    file = pq.ParquetFile(tmp_path / "all.parquet")
    sizes = [file.metadata.row_group(one).num_rows for one in range(file.num_row_groups)]
    assert max(sizes) == 50
    assert sum(sizes) == len(rows)
    assert all(row["minibatch"] == 0 for row in rows if row["fate"] == "trained")


def test_failed_export_leaves_nothing_behind(recorded: RecordedRun, tmp_path: Path) -> None:
    copy = recorded.copy(tmp_path / "copy")
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
    with (
        closing(recorded.open()) as bus,
        closing(read_catalogue(bus, recorded.topics)) as tables,
    ):
        digest = export_policy(tables, recorded.store, 5, tmp_path / "out")
    assert digest == _ledger(recorded).versions[5].digest
    assert (tmp_path / "out" / "config.json").is_file()
    assert (tmp_path / "out" / "model.safetensors").is_file()
