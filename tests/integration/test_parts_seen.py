"""A run whose batches are taken in parts, as a user sees it: waits, figures, a step, traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dora_pipe.audit.export import export_parquet
from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.describe import TRACE, Description, describe
from dora_pipe.observe.metrics.table import TRAINING
from dora_pipe.observe.trackers.steps import track
from dora_pipe.observe.waits import summarise, waits_of
from dora_pipe.observe.web.view import RunSource
from dora_pipe.schemas.control import StepCommitted
from dora_pipe.store.store import as_store
from tests.support.cluster import Cluster, make_config
from tests.support.stats_stage import stats_of
from tests.support.trackers import Kept
from tests.support.ui_stage import view_of_log

PART_NS = 30_000_000
"""Computing a part of one group."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = make_config(run__steps=4, trainer__batch_parts=4)
    directory = tmp_path_factory.mktemp("parts")
    plain = SimulatedLearner.train_part
    with (
        Cluster(directory, config, on_disk=False) as cluster,
        pytest.MonkeyPatch.context() as delta,
    ):

        def lasting(learner: SimulatedLearner, batch: TrainBatch, settings: Settings) -> None:
            cluster.clock.ns += PART_NS
            plain(learner, batch, settings)

        delta.setattr(SimulatedLearner, "train_part", lasting)
        cluster.run()
        yield cluster


def parted(cluster: Cluster) -> list[int]:
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        rows = catalogue.query("select distinct step from parts order by 1")
    assert rows
    return [step for (step,) in rows]


def described(cluster: Cluster, step: int) -> Description:
    source = RunSource(
        bus=cluster.bus, topics=cluster.topics, policies=as_store(cluster.store), decode=None
    )
    with view_of_log(source) as view:
        return describe(view, source, str(step))


def test_summary_says_what_parts_have_saved(cluster: Cluster) -> None:
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        summary = summarise(cluster.bus, cluster.topics, catalogue)
        waits = waits_of(catalogue)
        (early_s,) = catalogue.query("select sum(early_s) from steps")[0]
    assert summary.early_s == early_s > 0
    assert 0 < summary.saved_s <= early_s
    share = early_s / (early_s + summary.training_s)
    assert summary.overlap_s == pytest.approx(
        sum(commit.overlap_s for commit in cluster.facts(StepCommitted))
    )
    ahead = replace(summary, overlap_s=2.0).ahead
    assert ahead.endswith("; 2.0 s more while a version was published")
    assert f"({share:.0%}) before the batch was complete" in summary.ahead
    for wait in waits:
        assert sum(piece.seconds for piece in wait.pieces) == pytest.approx(wait.waited_s)


def test_numbers_tile_the_time_of_a_step(cluster: Cluster) -> None:
    stats = stats_of(cluster.bus, cluster.topics)
    for step in stats.steps:
        assert step.seconds == pytest.approx(
            step.waited_s + step.early_s + step.training_s, abs=1e-6
        )
    assert sum(step.early_s for step in stats.steps) == pytest.approx(
        stats.ahead_ms / 1000, abs=0.01
    )
    (counted,) = [entry for entry in TRAINING if entry.name == "trainer_overlap_seconds_total"]
    assert counted.read(stats) == stats.ahead_ms / 1000


def test_trackers_are_told_what_was_computed_ahead(cluster: Cluster) -> None:
    kept = Kept()
    track(cluster.bus, cluster.topics, kept, lambda _: ())
    rows = {row.step: row.metrics for row in kept.given if "train/loss" in row.metrics}
    replies = {step.step: step for step in stats_of(cluster.bus, cluster.topics).steps}
    assert {step for step, row in rows.items() if "time/early_s" in row} == set(parted(cluster))
    for step in parted(cluster):
        early_s, training_s = replies[step].early_s, replies[step].training_s
        assert rows[step]["time/early_s"] == early_s
        assert rows[step]["time/early_share"] == early_s / (early_s + training_s)


def test_step_says_its_parts_and_its_groups_which_they_are_in(cluster: Cluster) -> None:
    step = parted(cluster)[0]
    description = described(cluster, step)
    sizes = [int(word) for word in description["step"]["parts"].split()]
    assert len(sizes) > 1
    counted = [row["part"] for row in description["groups"]]
    assert [counted.count(part) for part in range(len(sizes))] == sizes
    assert counted == sorted(counted)
    stages = [row["stage"] for row in description[TRACE]]
    assert "part" in stages


def test_export_has_the_part_of_a_trajectory_beside_its_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "run.parquet"
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        export_parquet(cluster.bus, cluster.topics, catalogue, None, path)
        earlier_rows = dict(
            catalogue.query("select group_id, part from groups where outcome = 'trained'")
        )
    rows = pq.read_table(path, columns=["group", "step", "part"]).to_pylist()
    trained = [row for row in rows if row["step"] is not None]
    assert {row["group"]: row["part"] for row in trained} == earlier_rows
    assert all(row["part"] is None for row in rows if row["step"] is None)


def test_a_step_without_parts_says_nothing_of_them(cluster: Cluster) -> None:
    full = set(range(4)) - set(parted(cluster))
    for step in full:
        description = described(cluster, step)
        assert not {"parts", "early s"} & description["step"].keys()
        assert all("part" not in entry for entry in description["groups"])
