"""Tests of filters, order and pages of lists, and timeline windows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web import tables
from dora_pipe.observe.web.timeline import merged, timeline
from dora_pipe.observe.web.view import Query, parse_query
from tests.support import orchestrator_records as records
from tests.support.catalogue_stage import SECOND_NS, CatalogueStage
from tests.support.ui_stage import view_of_stage


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    incarnation = stage.worker()
    stage.fact(records.ready("w0", incarnation, 0, load_ms=500))
    specs = [stage.group(index) for index in range(5)]
    for number, spec in enumerate(specs[:3]):
        stage.place(spec, incarnation)
        stage.log(spec, incarnation, rewards=(number / 2, None), tokens=10 * (number + 1))
    stage.train(0, *specs[:2])
    stage.fact(records.ready("w0", incarnation, 1, load_ms=250))
    stage.end(specs[2], "filtered", "no advantage")
    stage.end(specs[3], "failed")
    yield stage
    stage.catalogue.close()


def _names(result: dict[str, Any]) -> list[str]:
    return [str(row[0]) for row in result["rows"]]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ("outcome=trained", ["g0000000001", "g0000000000"]),
        ("outcome=open", ["g0000000004"]),
        ("step=0", ["g0000000001", "g0000000000"]),
        ("q=0003", ["g0000000003"]),
        ("version=7", []),
        ("staleness=0", ["g0000000001", "g0000000000"]),
        ("purpose=eval", []),
    ],
)
def test_groups_are_filtered_newest_first(
    stage: CatalogueStage, fields: str, expected: list[str]
) -> None:
    groups = tables.groups(view_of_stage(stage), parse_query(f"?{fields}"))
    assert _names(groups) == expected
    assert groups["total"] == len(expected)


@pytest.mark.parametrize(
    ("fields", "count"),
    [
        ("", 10),
        ("valid=yes", 3),
        ("valid=no", 7),
        ("reward_min=.5", 2),
        ("reward_max=.4", 1),
        ("tokens_min=20", 4),
        ("tokens_min=1&tokens_max=10", 2),
        ("worker=w0", 6),
        ("finish=length", 0),
        ("q=g0000000001-000", 1),
        ("attempts_min=1", 6),
        ("attempts=2", 0),
        ("logged_s_max=0", 0),
        ("logged_s_min=0", 6),
    ],
)
def test_trajectories_are_filtered(stage: CatalogueStage, fields: str, count: int) -> None:
    assert tables.trajectories(view_of_stage(stage), parse_query(f"?{fields}"))["total"] == count


@pytest.mark.parametrize(("order", "pick"), [("tokens", min), ("-tokens", max)])
def test_trajectories_are_sorted_and_what_has_no_value_comes_last(
    stage: CatalogueStage, order: str, pick: Callable[[list[int]], int]
) -> None:
    trajectories = tables.trajectories(view_of_stage(stage), parse_query(f"?sort={order}"))
    values = [row[trajectories["columns"].index("tokens")] for row in trajectories["rows"]]
    there = [value for value in values if value is not None]
    assert values[0] == pick(there)
    assert values == there + [None] * (len(values) - len(there))


@pytest.mark.parametrize(
    ("listed", "listing"),
    [
        (tables.steps, tables.STEPS),
        (tables.groups, tables.GROUPS),
        (tables.trajectories, tables.TRAJECTORIES),
        (tables.decisions, tables.DECISIONS),
    ],
)
def test_every_column_sorts_and_every_number_has_bounds(
    stage: CatalogueStage, listed: Callable[..., dict[str, Any]], listing: tables.Listing
) -> None:
    view = view_of_stage(stage)
    for name in listing.names:
        assert listed(view, parse_query(f"?sort=-{name}"))["total"] > 0, name
    for name in listing.numbers:
        assert listed(view, parse_query(f"?{name}_min=99999"))["total"] == 0, name


def test_unknown_column_is_refused_and_the_known_ones_named(stage: CatalogueStage) -> None:
    with pytest.raises(UsageError) as error:
        tables.trajectories(view_of_stage(stage), parse_query("?sort=colour"))
    assert "tokens" in (error.value.hint or "")


def test_pages_follow_each_other_and_are_bounded(stage: CatalogueStage) -> None:
    names: list[str] = []
    for offset in range(0, 10, 3):
        asked = parse_query(f"?limit=3&offset={offset}")
        names += _names(tables.trajectories(view_of_stage(stage), asked))
    assert names == _names(tables.trajectories(view_of_stage(stage), parse_query("?limit=99999")))
    assert (
        len(_names(tables.trajectories(view_of_stage(stage), parse_query("?limit=-5&offset=-9"))))
        == 1
    )


def test_decisions_are_sought_in_subject_and_reason(stage: CatalogueStage) -> None:
    decisions = tables.decisions(view_of_stage(stage), parse_query("?kind=end&q=ADVANTAGE"))
    assert [row[2] for row in decisions["rows"]] == ["g0000000002"]
    assert decisions["counts"]["schedule"] == 6


def test_worker_has_a_stay_per_version_with_its_loading(stage: CatalogueStage) -> None:
    (row,) = timeline(view_of_stage(stage))["rows"]
    (first, second) = row["pieces"]
    assert (first[3], second[3]) == (0, 1)
    assert second[1] - second[0] == pytest.approx(0.25)
    assert first[2] == second[0]


def test_window_leaves_out_what_lies_outside(stage: CatalogueStage) -> None:
    (row,) = timeline(view_of_stage(stage), 0.0, 3.0)["rows"]
    assert [entry[3] for entry in row["pieces"]] == [0]
    assert row["pieces"][0][2] == 3.0


def test_worker_that_comes_back_goes_on_in_its_row(stage: CatalogueStage) -> None:
    incarnation = view_of_stage(stage).value("select incarnation from workers")
    stage.fact(records.left("w0", incarnation))
    stage.now_ns += SECOND_NS
    again = stage.worker()
    stage.now_ns += SECOND_NS
    stage.fact(records.ready("w0", again, 1))
    (row,) = timeline(view_of_stage(stage))["rows"]
    assert len(row["gone"]) == 1


PIECES = st.lists(st.floats(0.001, 5.0), min_size=1, max_size=200)


@given(PIECES, st.integers(1, 50))
def test_merged_stays_cover_the_same_time_and_are_few(lengths: list[float], most: int) -> None:
    pieces, index = [], 0.0
    for version, length in enumerate(lengths):
        pieces.append([index, index, index + length, float(version)])
        index += length
    result = merged(pieces, most, index / most)
    assert result[0][0] == 0.0
    assert result[-1][2] == pytest.approx(index)
    assert all(a[2] == b[0] for a, b in pairwise(result))
    assert len(result) <= 2 * most + 1


HOSTILE = (
    "'",
    "' or 1=1 --",
    '"; drop table steps; --',
    "?",
    "$1",
    "%",
    "\\",
    "\x00",
    "ü\U0001f600",
)


@pytest.mark.parametrize("text", HOSTILE)
def test_what_is_asked_for_never_becomes_sql(stage: CatalogueStage, text: str) -> None:
    view, everything = view_of_stage(stage), Query(path=(), fields={})
    for name in ("q", "outcome", "purpose", "worker", "finish", "kind"):
        asked = Query(path=(), fields={name: text})
        for listed in (tables.groups, tables.trajectories, tables.decisions):
            assert listed(view, asked)["total"] in (0, listed(view, everything)["total"])
    with pytest.raises(UsageError):
        tables.trajectories(view, Query(path=(), fields={"sort": text}))
    assert tables.steps(view, everything)["total"] == 1


@pytest.mark.parametrize("fields", ["?step=1" + "0" * 60, "?offset=1" + "0" * 60, "?tokens_min=-5"])
def test_numbers_of_any_size_are_answered_or_refused(stage: CatalogueStage, fields: str) -> None:
    try:
        trajectories = tables.trajectories(view_of_stage(stage), parse_query(fields))
    except UsageError as error:
        assert error.message
    else:
        assert trajectories["total"] <= 10
