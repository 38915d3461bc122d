"""A run whose batches are taken in parts, as a user sees it: waits, figures, a step, traces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from dora_pipe.audit.describe import TRACE, describe
from dora_pipe.audit.export import export_parquet
from dora_pipe.audit.reading import records_of
from dora_pipe.consumers.learners.learner import Settings, TrainBatch
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.core.pure.records import TopicPartition
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.observe.metrics.table import TRAINING
from dora_pipe.observe.trackers.steps import track
from dora_pipe.observe.waits import summarise, waits_of
from dora_pipe.schemas.control import StepCommitted, decode_control
from tests.support.cluster import Cluster, make_config
from tests.support.stats_stage import stats_of
from tests.support.trackers import Kept

PART_NS = 30_000_000
"""Computing a part of one group."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    config = make_config(run__steps=4, trainer__batch_parts=4)
    directory = tmp_path_factory.mktemp("parts")
    plain = SimulatedLearner.train_part
    with Cluster(directory, config, on_disk=False) as made, pytest.MonkeyPatch.context() as delta:

        def lasting(learner: SimulatedLearner, batch: TrainBatch, settings: Settings) -> None:
            made.clock.ns += PART_NS
            plain(learner, batch, settings)

        delta.setattr(SimulatedLearner, "train_part", lasting)
        made.run()
        yield made


def parted(cluster: Cluster) -> list[int]:
    """Steps whose batch was taken in parts."""
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        rows = catalogue.query("select distinct step from parts order by 1")
    assert rows
    return [step for (step,) in rows]


def overlap_s(cluster: Cluster) -> float:
    control = TopicPartition(cluster.topics.control, 0)
    records = records_of(cluster.bus, {control: cluster.bus.end(control)})
    facts = [decode_control(record.value) for record in records]
    return sum(one.overlap_s for one in facts if isinstance(one, StepCommitted))


def test_summary_says_what_parts_have_saved(cluster: Cluster) -> None:
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        found = summarise(cluster.bus, cluster.topics, catalogue)
        waits = waits_of(catalogue)
        (early_s,) = catalogue.query("select sum(early_s) from steps")[0]
    assert found.early_s == early_s > 0
    assert 0 < found.saved_s <= early_s
    share = early_s / (early_s + found.training_s)
    assert found.overlap_s == pytest.approx(overlap_s(cluster))
    told = replace(found, overlap_s=2.0).ahead
    assert told.endswith("; 2.0 s more while a version was published")
    assert f"({share:.0%}) before the batch was complete" in found.ahead
    for one in waits:
        assert sum(piece.seconds for piece in one.pieces) == pytest.approx(one.waited_s)


def test_numbers_tile_the_time_of_a_step(cluster: Cluster) -> None:
    stats = stats_of(cluster.bus, cluster.topics)
    for one in stats.steps:
        assert one.seconds == pytest.approx(one.waited_s + one.early_s + one.training_s, abs=1e-6)
    assert sum(one.early_s for one in stats.steps) == pytest.approx(stats.ahead_ms / 1000, abs=0.01)
    (counted,) = [one for one in TRAINING if one.name == "trainer_overlap_seconds_total"]
    assert counted.read(stats) == stats.ahead_ms / 1000


def test_trackers_are_told_what_was_computed_ahead(cluster: Cluster) -> None:
    kept = Kept()
    track(cluster.bus, cluster.topics, kept, lambda _: ())
    rows = {row.step: row.metrics for row in kept.given if "train/loss" in row.metrics}
    told = {one.step: one for one in stats_of(cluster.bus, cluster.topics).steps}
    assert {step for step, found in rows.items() if "time/early_s" in found} == set(parted(cluster))
    for step in parted(cluster):
        early_s, training_s = told[step].early_s, told[step].training_s
        assert rows[step]["time/early_s"] == early_s
        assert rows[step]["time/early_share"] == early_s / (early_s + training_s)


def test_step_says_its_parts_and_its_groups_which_they_are_in(cluster: Cluster) -> None:
    step = parted(cluster)[0]
    found = describe(cluster.bus, cluster.topics, cluster.store, str(step))
    sizes = [int(one) for one in found["step"]["parts"].split()]
    assert len(sizes) > 1
    counted = [one["part"] for one in found["groups"]]
    assert [counted.count(part) for part in range(len(sizes))] == sizes
    assert counted == sorted(counted)
    stages = [one["stage"] for one in found[TRACE]]
    assert "part" in stages


def test_export_has_the_part_of_a_trajectory_beside_its_step(
    cluster: Cluster, tmp_path: Path
) -> None:
    path = tmp_path / "run.parquet"
    with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
        export_parquet(cluster.bus, cluster.topics, catalogue, None, path)
        known = dict(catalogue.query("select group_id, part from groups where outcome = 'trained'"))
    rows = pq.read_table(path, columns=["group", "step", "part"]).to_pylist()
    trained = [one for one in rows if one["step"] is not None]
    assert {one["group"]: one["part"] for one in trained} == known
    assert all(one["part"] is None for one in rows if one["step"] is None)


def test_a_step_without_parts_says_nothing_of_them(cluster: Cluster) -> None:
    whole = set(range(4)) - set(parted(cluster))
    for step in whole:
        found = describe(cluster.bus, cluster.topics, cluster.store, str(step))
        assert not {"parts", "early s"} & found["step"].keys()
        assert all("part" not in one for one in found["groups"])
