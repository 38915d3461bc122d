"""Tests of parts of a batch in the tables: times, waits, costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from dora_pipe.ledger.history import PartTaken, computed
from dora_pipe.ledger.reading import read_catalogue
from dora_pipe.schemas.rounds import GroupSpec
from tests.support.catalogue_stage import SECOND_NS, START_NS, CatalogueStage, differences
from tests.support.cluster import Cluster, make_config


def part(taken_s: int, *groups: str) -> PartTaken:
    return PartTaken(groups=groups, taken_ns=taken_s * SECOND_NS, reason="r", last=None)


def test_a_part_begins_when_it_is_there_and_the_one_before_it_is_done() -> None:
    parts = [part(3, "a"), part(4, "b"), part(9, "c")]
    result = list(computed(parts, (2.0, 1.5), SECOND_NS))
    assert [entry.begun_ns / SECOND_NS for entry in result] == [3, 5, 9]
    assert [entry.ended_ns / SECOND_NS for entry in result] == [5, 6.5, 9]
    assert [result.waited_s for result in result] == [2, 0, 2.5]


def test_parts_that_were_computed_with_the_batch_take_no_time_before_it() -> None:
    result = list(computed([part(3, "a"), part(4, "b"), part(5, "c")], (4.0,), 0))
    assert [result.seconds for result in result] == [4.0, None, None]
    assert [result.waited_s for result in result] == [3, 0, 0]


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    yield stage
    stage.catalogue.close()


def placed_groups(stage: CatalogueStage, incarnation: int, count: int) -> list[GroupSpec]:
    specs = [stage.spec(index) for index in range(count)]
    stage.decide(*map(stage.dispatch, specs))
    stage.decide(*(stage.placed(spec, "w0", incarnation) for spec in specs))
    return specs


def test_a_step_in_parts_has_a_row_for_each_and_waits_only_between_them(
    stage: CatalogueStage,
) -> None:
    incarnation = stage.worker()
    first, second, third = specs = placed_groups(stage, incarnation, 3)
    stage.log(first, incarnation)
    stage.part(0, 0, first)  # at 4 s
    stage.log(second, incarnation)
    stage.part(0, 1, second)  # at 6 s, while part 0 is computed
    stage.log(third, incarnation)
    stage.train(0, *specs, parts=(1, 1), early_s=(2.5, 1.0))  # at 8 s
    rows = stage.catalogue.query(
        """select part, (begun_ns - ?) / 1e9, waited_s, seconds, groups, trajectories, tokens,
                  last_trajectory from parts order by part""",
        [START_NS],
    )
    last = [f"{spec.group}-001" for spec in specs]
    assert rows == [
        (0, 4.0, 4.0, 2.5, 1, 2, 40, last[0]),
        (1, 6.5, 0.0, 1.0, 1, 2, 40, last[1]),
        (2, 8.0, 0.5, None, 1, 2, 40, last[2]),
    ]
    assert stage.catalogue.one("select waited_s, early_s, seconds from steps") == (4.5, 3.5, 9.0)
    parts = stage.catalogue.query("select group_id, part from groups order by 1")
    assert parts == [(spec.group, index) for index, spec in enumerate(specs)]
    assert stage.catalogue.one("select parts from batches") == (3,)
    waited = stage.catalogue.query("select part, sum(seconds) from waits group by 1 order by 1")
    assert waited == [(0, 4.0), (2, 0.5)], "every second is put down to somebody"


def test_a_part_that_is_taken_anew_replaces_those_from_its_number_on(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    first, second = placed_groups(stage, incarnation, 2)
    for entry in (first, second):
        stage.log(entry, incarnation)
    stage.part(0, 0, first)
    stage.part(0, 0, second)
    stage.train(0, second, first, parts=(1,))
    rows = stage.catalogue.query("select part, last_trajectory from parts order by 1")
    assert rows == [(0, f"{second.group}-001"), (1, f"{first.group}-001")]


def test_a_step_whose_batch_came_at_once_has_no_parts(stage: CatalogueStage) -> None:
    incarnation = stage.worker()
    first, second = placed_groups(stage, incarnation, 2)
    stage.log(first, incarnation)
    stage.part(0, 0, first)  # given up: the settings changed
    stage.log(second, incarnation)
    stage.train(0, first, second)
    assert stage.catalogue.query("select * from parts") == []
    assert stage.catalogue.query("select distinct part from groups") == [(None,)]
    assert stage.catalogue.one("select parts, early_s from batches join steps using (step)") == (
        1,
        0.0,
    )


def test_a_run_in_parts_is_told_alike_by_catalogue_and_audit(tmp_path: Path) -> None:
    config = make_config(run__steps=4, trainer__batch_parts=4)
    with Cluster(tmp_path, config, on_disk=False) as cluster:
        cluster.run()
        assert differences(cluster.bus, cluster.topics) == []
        with closing(read_catalogue(cluster.bus, cluster.topics)) as catalogue:
            several = catalogue.query(
                """select step, s.groups, s.waited_s, count(*), sum(p.groups), sum(p.waited_s)
                   from parts p join steps s using (step) group by all"""
            )
            rows = catalogue.query(
                """select abs(s.waited_s - sum(w.seconds)) < 1e-6 from waits w
                   join steps s using (step) group by step, s.waited_s"""
            )
    assert several, "a small cluster takes parts"
    for _, groups, waited_s, count, summed, waited in several:
        assert (groups, summed, waited) == (summed, 4, pytest.approx(waited_s))
        assert count > 1
    assert set(rows) == {(True,)}
