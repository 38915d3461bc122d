"""The pictures are sound XML and show every cell where its figures are."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.bench.offpolicy import summarise
from dora_pipe.bench.offpolicy_plot import WIDTH, Scale, courses, ends
from tests.support.offpolicy import measured

NS = "{http://www.w3.org/2000/svg}"
CELLS = [
    measured(name, eta, seed, 0.5 + 0.04 * eta + 0.01 * seed)
    for name in ("grpo", "tis")
    for eta in (0, 8)
    for seed in (0, 1)
]


def found(picture: str, tag: str) -> list[ElementTree.Element]:
    return ElementTree.fromstring(picture).findall(f"{NS}{tag}")


def texts(picture: str) -> list[str]:
    return [one.text or "" for one in found(picture, "text")]


def test_a_scale_maps_its_ends_to_its_ends() -> None:
    scale = Scale(low=0.2, high=0.8, start=100, end=40)
    assert (scale(0.2), scale(0.8), scale(0.5)) == (100, 40, 70)
    assert Scale(low=1, high=1, start=0, end=9)(1) == 0


def test_grids_have_round_lines_and_not_too_many() -> None:
    assert Scale(low=0.4, high=1.0, start=0, end=1).ticks() == [0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert Scale(low=0.8, high=0.9, start=0, end=1).ticks() == [0.8, 0.82, 0.84, 0.86, 0.88, 0.9]
    assert Scale(low=0.0, high=1.0, start=0, end=1).ticks() == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_courses_have_a_line_and_a_band_for_every_staleness_of_one_objective() -> None:
    picture = courses(CELLS, "tis")
    lines, bands = found(picture, "polyline"), found(picture, "polygon")
    assert len(lines) == len(bands) == 2
    assert [len(one.attrib["points"].split()) for one in lines] == [3, 3]
    assert {"eta 0", "eta 8", "step"} <= set(texts(picture))


def test_higher_rewards_are_drawn_higher() -> None:
    low, high = (
        float(one.attrib["points"].split()[-1].split(",")[1])
        for one in found(courses(CELLS, "grpo"), "polyline")
    )
    assert high < low


def test_one_seed_has_no_band() -> None:
    assert found(courses([measured("grpo", 0, 0, 0.8)], "grpo"), "polygon") == []


def test_ends_have_a_row_for_every_objective_and_a_dot_for_every_staleness() -> None:
    picture = ends(summarise(CELLS))
    assert len(found(picture, "circle")) == 4
    assert {"grpo", "tis", "eta 0", "eta 8"} <= set(texts(picture))


@given(rewards=st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_nothing_is_drawn_outside_of_the_picture(rewards: list[float]) -> None:
    cells = [measured("grpo", eta, 0, reward) for eta, reward in enumerate(rewards)]
    for one in found(ends(summarise(cells)), "circle"):
        assert 0 <= float(one.attrib["cx"]) <= WIDTH
    for line in found(courses(cells, "grpo"), "polyline"):
        for point in line.attrib["points"].split():
            assert all(0 <= float(value) <= WIDTH for value in point.split(","))
