"""Tests of parts of a batch on timeline and step page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest

from dora_pipe.observe.web.overview import overview
from dora_pipe.observe.web.pages import step_page
from dora_pipe.observe.web.timeline import timeline
from dora_pipe.observe.web.view import Query, RunSource
from tests.support.catalogue_stage import CatalogueStage
from tests.support.ui_stage import view_of_stage

NO_SOURCE = cast(RunSource, None)
"""A step's page uses tables only."""


@pytest.fixture
def stage() -> Iterator[CatalogueStage]:
    stage = CatalogueStage()
    yield stage
    stage.catalogue.close()


def two_steps(stage: CatalogueStage, *, parts: bool) -> list[str]:
    incarnation = stage.worker()
    specs = [stage.spec(index) for index in range(4)]
    stage.decide(*map(stage.dispatch, specs))
    stage.decide(*(stage.placed(spec, "w0", incarnation) for spec in specs))
    for number, spec in enumerate(specs[:3]):
        stage.log(spec, incarnation)
        if parts and number < 2:
            stage.part(0, number, spec)  # at 4 s and at 6 s
    sizes, early_s = ((1, 1), (1.5,)) if parts else ((), ())
    stage.train(0, *specs[:3], parts=sizes, early_s=early_s)
    stage.log(specs[3], incarnation)
    stage.train(1, specs[3])
    return [spec.group for spec in specs]


def page(stage: CatalogueStage, step: int) -> dict[str, Any]:
    asked = Query(path=("step", str(step)), fields={})
    sections: dict[str, Any] = step_page(view_of_stage(stage), NO_SOURCE, asked)["sections"]
    return sections


def test_trainer_s_line_has_a_stripe_for_each_part_ahead_and_one_for_the_rest(
    stage: CatalogueStage,
) -> None:
    two_steps(stage, parts=True)
    assert overview(view_of_stage(stage))["timeline"]["trainer"] == [
        [4.0, 4.0, 5.5, 0, 0, 1, 40],
        [8.0, 2.5, 9.0, 2, 0, 2, 80],
        [11.0, 2.0, 12.0, None, 1, 1, 40],
    ]
    (closer,) = timeline(view_of_stage(stage), 5.0, 6.0)["trainer"]
    assert closer == [5.0, 4.0, 5.5, 0, 0, 1, 40], "what reaches into the window, cut"


def test_step_s_page_lists_its_parts_and_which_its_groups_are_in(stage: CatalogueStage) -> None:
    names = two_steps(stage, parts=True)
    actual_page = page(stage, 0)
    assert [list(row.values()) for row in actual_page["parts"]] == [
        [0, 4.0, 4.0, 4.0, 1.5, 1, 40, f"{names[0]}-001", "some finished"],
        [1, 6.0, 6.0, 0.5, None, 1, 40, f"{names[1]}-001", "some finished"],
        [2, 8.0, 8.0, 2.0, None, 1, 40, f"{names[2]}-001", "all finished"],
    ]
    assert [(row["group"], row["part"]) for row in actual_page["groups"]] == [
        (name, part) for part, name in enumerate(names[:3])
    ]
    assert "parts" not in page(stage, 1)


def test_pages_of_a_run_without_parts_say_nothing_of_them(stage: CatalogueStage) -> None:
    two_steps(stage, parts=False)
    actual_overview = overview(view_of_stage(stage))
    assert "trainer" not in actual_overview["timeline"]
    assert not any(actual_overview["points"]["ahead"])
    plain = page(stage, 0)
    assert "parts" not in plain
    assert not any("part" in row for row in plain["groups"])
