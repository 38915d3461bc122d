"""Tests of the catalogue's tables and its saved file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from dora_pipe.core.errors import ResourceError, UsageError
from dora_pipe.ledger.database import (
    COUNTS,
    Catalogue,
    CatalogueSource,
    fresh_catalogue,
    logged_records,
)
from dora_pipe.ledger.evaluations import evaluations_of
from dora_pipe.ledger.tables import TABLES
from dora_pipe.schemas.control import BatchRefused, Offender, RequestFailed, WorkerLeft
from dora_pipe.schemas.rounds import Assign, Cancel, Dispatch, Fence, Outcome, StopRun
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS, CatalogueStage

SOURCE = CatalogueSource(run="run", control_next=7, decisions_next=3, chain="ab")


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    yield stage
    stage.catalogue.close()


def test_a_logged_request_has_a_row_with_its_record(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation, rewards=(1.0, None), offset=40)
    rows = stage.catalogue.query(
        "select sample, worker, reward, record_offset, tokens, attempts from trajectories"
    )
    assert sorted(rows) == [(0, "w0", 1.0, 40, 20, 1), (1, "w0", None, 41, 20, 1)]
    assert stage.catalogue.one("select outcome, results, valid, reward from groups") == (
        "open",
        2,
        1,
        1.0,
    )


def test_a_record_of_an_older_attempt_does_not_count(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.place(spec, incarnation, attempt=2)
    stage.log(spec, incarnation, attempt=1, offset=3)
    stage.log(spec, incarnation, attempt=2, offset=7)
    stage.log(spec, incarnation, attempt=2, offset=9)
    standings = "select status, count(*) from records group by 1 order by 1"
    assert stage.catalogue.query(standings) == [("bound", 2), ("superseded", 4)]
    places = "select record_offset from trajectories order by 1"
    assert stage.catalogue.query(places) == [(7,), (8,)]


def test_a_record_reported_again_after_its_group_ended_has_one_row(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation, offset=5)
    stage.train(0, spec)
    stage.log(spec, incarnation, offset=5)
    assert stage.catalogue.query("select status, record_offset from records order by 2") == [
        ("bound", 5),
        ("bound", 6),
    ]


@pytest.mark.parametrize("how", ["fenced", "left", "joined again"])
def test_a_record_of_a_worker_that_is_out_does_not_count(stage: CatalogueStage, how: str) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    if how == "fenced":
        stage.decide(Fence(reason="silent", worker="w0", incarnation=incarnation))
    elif how == "left":
        stage.fact(WorkerLeft(at_ns=0, worker="w0", incarnation=incarnation, reason="asked"))
    else:
        stage.worker()
    stage.log(spec, incarnation)
    standing = "superseded" if how == "left" else "fenced"
    assert stage.catalogue.query("select distinct status from records") == [(standing,)]
    assert stage.catalogue.query("select distinct outcome from attempts") == [
        ("left" if how == "left" else "fenced",)
    ]
    result = stage.catalogue.one(f"select departure from workers where incarnation = {incarnation}")
    assert result == ("left" if how == "left" else "fenced",)


def test_a_step_sums_up_its_batch(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    specs = [stage.group(0), stage.group(1)]
    for number, spec in enumerate(specs):
        stage.place(spec, incarnation)
        stage.log(
            spec, incarnation, rewards=(1.0, None) if number else (1.0, 0.0), tokens=20 + number
        )
    stage.train(0, *specs, metrics={"loss": 0.25, "grad_norm": 1.5})
    row = stage.catalogue.records("select * from steps")[0]
    assert (row["loss"], row["grad_norm"]) == (0.25, 1.5)
    assert (row["groups"], row["trajectories"], row["valid"], row["tokens"]) == (2, 4, 3, 82)
    assert row["reward"] == pytest.approx(2 / 3)
    assert row["reward_raw"] == pytest.approx(0.5)
    assert (row["reward_low"], row["reward_high"]) == (0.625, 0.875)
    deciles = [row[f"tokens_{name}"] for name in ("p10", "p50", "p90", "max")]
    assert deciles == [20, 20, 21, 21]
    assert (row["staleness_max"], row["bound"], row["over_bound"]) == (0, 1, 0)
    assert row["waited_s"] == pytest.approx((row["taken_ns"] - row["free_ns"]) / 1e9)
    assert row["waited_for"] == f"{specs[1].group}-001"
    assert row["waited_worker"] == "w0"
    assert stage.catalogue.query("select distinct outcome, step, staleness from groups") == [
        ("trained", 0, 0)
    ]
    assert stage.catalogue.query("select version from versions order by 1") == [(0,), (1,)]


def test_a_wait_is_cut_where_what_it_was_for_changed_hands(stage: CatalogueStage) -> None:
    dead = stage.worker()
    stage.train(0)
    spec = stage.group(0)
    stage.place(spec, dead)
    stage.decide(Fence(reason="silent", worker="w0", incarnation=dead))
    incarnation = stage.worker("w1")
    stage.place(spec, incarnation, worker="w1", attempt=2)
    stage.log(spec, incarnation, attempt=2)
    stage.take(1, spec)
    pieces = stage.catalogue.query("select kind, worker, version, seconds from waits")
    assert pieces == [
        ("admission", None, 0, 1.0),
        ("queue", None, 0, 1.0),
        ("lost", "w0", 0, 2.0),
        ("sampling", "w1", 0, 1.0),
        ("decision", None, 0, 1.0),
    ]


@pytest.mark.parametrize(
    ("outcome", "kind"), [("filtered", "unusable"), ("cancelled", "admission")]
)
def test_a_wait_through_a_batch_of_unusable_groups(
    stage: CatalogueStage, outcome: Outcome, kind: str
) -> None:
    incarnation = stage.worker()
    stage.train(0)
    stage.end(stage.group(0), outcome)
    spec = stage.group(1)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    stage.take(1, spec)
    first = stage.catalogue.one("select kind, step from waits")
    assert first == (kind, 1)


def test_a_load_has_the_moment_at_which_it_was_decided(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    load = Assign(reason="newest", worker="w0", incarnation=incarnation, version=3, digest="d")
    stage.decide(load)
    stage.now_ns += 2 * SECOND_NS
    stage.fact(records.ready("w0", incarnation, 3))
    stage.fact(records.ready("w0", incarnation, 3))
    sql = "select version, (ready_ns - assigned_ns) / 1e9 from served_versions"
    rows = stage.catalogue.query(sql)
    assert rows == [(3, 2.0), (3, None)]


def test_records_are_found_by_what_is_said_of_them(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation, offset=5)
    stage.log(spec, incarnation, offset=9)
    name = f"{spec.group}-000"
    counted = logged_records(stage.catalogue, f"{COUNTS} and trajectory_id = ?", [name])
    assert [(location, entry.trajectory) for location, entry in counted.items()] == [((0, 5), name)]
    every = logged_records(stage.catalogue, "true")
    assert [entry.status for entry in every.values()] == ["bound"] * 2 + ["superseded"] * 2


def test_a_second_commit_of_a_step_counts_for_nothing(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    stage.train(0, spec)
    stage.fact(records.committed(0, (stage.taken(spec),)))
    assert stage.catalogue.one("select count(*) from steps") == (1,)


def test_a_refused_batch_gives_its_groups_back(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    stage.take(0, spec)
    assert stage.catalogue.one("select outcome, step from groups") == ("open", 0)
    in_force = stage.catalogue.one("select outcome, ended_ns, last_trajectory from batches")
    assert in_force == (None, None, f"{spec.group}-001")
    offender = Offender(group=spec.group, trajectory="", reason="unreadable")
    refused = BatchRefused(at_ns=0, step=0, attempt=1, incarnation=0, offenders=(offender,))
    stage.now_ns += SECOND_NS
    stage.fact(refused)
    assert stage.catalogue.one("select outcome, step from groups") == ("open", None)
    assert stage.catalogue.one("select outcome, end_reason, ended_ns from batches") == (
        "refused",
        f"{spec.group}: unreadable",
        stage.now_ns,
    )


def test_times_of_a_trajectory_are_those_of_the_records(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    dispatched_ns = stage.now_ns
    stage.now_ns += 2 * SECOND_NS
    stage.place(spec, incarnation)
    stage.log(spec, incarnation)
    logged_ns = stage.now_ns
    stage.train(0, spec)
    assert stage.catalogue.one(
        "select dispatched_ns, complete_ns, taken_ns, ended_ns from groups"
    ) == (dispatched_ns, logged_ns, logged_ns + SECOND_NS, logged_ns + 2 * SECOND_NS)
    assert stage.catalogue.one("select min(scheduled_ns), min(logged_ns) from trajectories") == (
        dispatched_ns + 3 * SECOND_NS,
        logged_ns,
    )


def test_an_attempt_says_how_it_ended(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    name = f"{spec.group}-000"
    failed = RequestFailed(
        at_ns=0,
        worker="w0",
        incarnation=incarnation,
        trajectory=name,
        attempt=1,
        error="EngineError",
        message="no room",
        retryable=True,
    )
    stage.fact(failed)
    cancel = Cancel(
        reason="its group failed",
        trajectory=f"{spec.group}-001",
        attempt=1,
        worker="w0",
        incarnation=incarnation,
    )
    stage.decide(cancel)
    rows = stage.catalogue.query(
        "select schedule_reason, outcome, end_reason from attempts order by trajectory_id"
    )
    assert rows == [
        ("its turn", "failed", "EngineError: no room"),
        ("its turn", "cancelled", "its group failed"),
    ]
    assert stage.catalogue.one("select error, message, retryable from failures") == (
        "EngineError",
        "no room",
        True,
    )


def test_evaluations_are_a_view_by_version(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    for ordinal, rewards in enumerate([(1.0, 0.0), (None, 1.0)]):
        spec = stage.group(ordinal, purpose="eval")
        stage.place(spec, incarnation)
        stage.log(spec, incarnation, rewards=rewards)
        stage.end(spec, "evaluated")
    records = stage.catalogue.records("select version, groups, valid, reward from evaluations")
    assert records == [{"version": 0, "groups": 2, "valid": 3, "reward": pytest.approx(2 / 3)}]
    (evaluated,) = evaluations_of(stage.catalogue)
    assert (evaluated.version, evaluated.evaluation, evaluated.prompts, evaluated.trajectories) == (
        0,
        "",
        2,
        3,
    )
    values = {name: figure.value for name, figure in evaluated.metrics.items()}
    assert values == {"mean@2": 0.75, "pass@1": 0.75, "pass@2": 1.0}


def test_a_run_says_whether_it_was_stopped(stage: CatalogueStage) -> None:
    assert stage.catalogue.one("select run, stopped from runs") == (records.RUN, False)
    stage.decide(StopRun(reason="all steps are done"))
    assert stage.catalogue.one("select stopped from runs") == (True,)


def test_a_saved_catalogue_is_opened_where_it_fits_the_log(
    stage: CatalogueStage, tmp_path: Path
) -> None:
    spec = stage.group(0)
    stage.end(spec, "cancelled")
    path = tmp_path / "it's.duckdb"
    stage.catalogue.save(path, SOURCE)
    catalogue = fresh_catalogue(path, SOURCE)
    assert catalogue is not None
    with closing(catalogue):
        assert catalogue.query("select outcome from groups") == [("cancelled",)]
        assert catalogue.query("select * from evaluations") == []
        assert catalogue.source == SOURCE
    assert [path.name for path in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("field", ["form", "run", "control_next", "decisions_next", "chain"])
def test_a_catalogue_of_another_log_is_not_taken(
    stage: CatalogueStage, tmp_path: Path, field: str
) -> None:
    path = tmp_path / "catalogue.duckdb"
    stage.catalogue.save(path, SOURCE)
    other = "other" if field in ("run", "chain") else 99
    assert fresh_catalogue(path, replace(SOURCE, **{field: other})) is None


@pytest.mark.parametrize("damage", [b"", b"not a database", b"\0" * 20_000])
def test_a_damaged_catalogue_is_not_taken(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "catalogue.duckdb"
    path.write_bytes(damage)
    assert fresh_catalogue(path, SOURCE) is None


def test_a_catalogue_that_cannot_be_written_leaves_nothing(
    stage: CatalogueStage, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match="cannot write"):
        stage.catalogue.save(tmp_path / "absent" / "catalogue.duckdb", SOURCE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("select nothing from groups", "nothing"),
        ("selec 1", "selec"),
        ("select * from absent", "absent"),
        ("load httpfs", "httpfs"),
    ],
)
def test_a_query_that_cannot_be_answered_is_one_line(
    stage: CatalogueStage, sql: str, why: str
) -> None:
    with pytest.raises(UsageError, match=why) as error:
        stage.catalogue.query(sql)
    assert "\n" not in error.value.message


def test_rows_that_were_open_are_not_there_twice(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    spec = stage.group(0)
    stage.place(spec, incarnation)
    for _ in range(2):
        assert stage.catalogue.one("select count(*) from trajectories") == (2,)
    stage.end(spec, "failed", "no trajectory is valid")
    assert stage.catalogue.query("select outcome, end_reason from groups") == [
        ("failed", "no trajectory is valid")
    ]
    assert stage.catalogue.one("select count(*) from trajectories") == (2,)


def test_a_new_catalogue_has_every_table_and_no_row() -> None:
    with closing(Catalogue()) as catalogue:
        for table in TABLES:
            assert catalogue.query(f"select * from {table.name}") == []
        assert catalogue.source is None


def test_rows_that_a_dispatch_skips_are_events(stage: CatalogueStage) -> None:
    spec = stage.group(0)
    later = replace(spec, group="g0000000001", ordinal=1)
    stage.decide(Dispatch(spec=later, reason="a slot is free", skipped=(17, 31)))
    skipped = "select subject from events where kind = 'row-skipped' order by 1"
    assert stage.catalogue.query(skipped) == [("train#17",), ("train#31",)]
