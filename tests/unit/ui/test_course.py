"""A quantity over time: slices grow wider, sums stay the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.ui.course import FIRST_NS, SLICES_MAX, Course, Filling

START_NS = 10**18
SECOND_NS = 10**9
SPANS = st.lists(st.tuples(st.integers(0, 10**13), st.integers(0, 10**11)), max_size=30)


@given(SPANS)
def test_sum_is_value_times_seconds_however_wide_the_slices_became(
    spans: list[tuple[int, int]],
) -> None:
    course = Course(START_NS)
    for at, length in spans:
        course.add(START_NS + at, START_NS + at + length, 2.0)
    expected = sum(2.0 * length / 1e9 for _, length in spans)
    assert sum(course.sums) == pytest.approx(expected)
    assert len(course.sums) <= SLICES_MAX
    assert sum(course.widened(course.width_ns * 8)) == pytest.approx(expected)


def test_no_slice_holds_more_than_its_width() -> None:
    course = Course(START_NS)
    course.add(START_NS, START_NS + 3 * FIRST_NS // 2, 1.0)
    assert course.sums == pytest.approx([FIRST_NS / 1e9, FIRST_NS / 2e9])


def test_counts_lie_where_they_happened() -> None:
    course = Course(START_NS)
    course.count(START_NS + 2 * FIRST_NS, 5)
    course.count(START_NS - 1, 1)
    assert course.sums == [1, 0, 5]


def test_worker_is_filled_by_what_it_has_and_never_above_its_slots() -> None:
    filling = Filling(START_NS, 2, START_NS)
    filling.change(START_NS + SECOND_NS, 1)
    filling.change(START_NS + 2 * SECOND_NS, 5)
    filling.change(START_NS + 3 * SECOND_NS, -6)
    filling.until(START_NS + 4 * SECOND_NS)
    assert sum(filling.course.sums) == pytest.approx(1 * 0.5 + 1 * 1.0)
    assert sum(filling.there.sums) == pytest.approx(4.0)


def test_clock_that_goes_back_moves_nothing() -> None:
    filling = Filling(START_NS, 1, START_NS)
    filling.change(START_NS + SECOND_NS, 1)
    filling.change(START_NS, -1)
    filling.until(START_NS + 2 * SECOND_NS)
    assert filling.requests == 0
    assert sum(filling.course.sums) == 0
