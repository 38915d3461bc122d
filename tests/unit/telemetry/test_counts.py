"""Histograms count every observation once, in the first bucket that takes it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.telemetry.counts import Histogram

BOUNDS = (0.0, 1.0, 2.5, 10.0)


def test_value_at_a_bound_belongs_to_its_bucket_and_one_above_all_to_infinity() -> None:
    told = Histogram(BOUNDS)
    for value in (0.0, 1.0, 1.1, 99.0):
        told.add(value)
    assert list(told.cumulative()) == [(0.0, 1), (1.0, 2), (2.5, 3), (10.0, 3), (float("inf"), 4)]
    assert told.total == 101.1


@given(st.lists(st.tuples(st.floats(-5, 50), st.integers(1, 4))))
def test_every_bound_counts_what_is_not_above_it(observed: list[tuple[float, int]]) -> None:
    told = Histogram(BOUNDS)
    for value, times in observed:
        told.add(value, times)
    for bound, count in told.cumulative():
        assert count == sum(times for value, times in observed if value <= bound)
    assert told.observations == sum(times for _, times in observed)


def test_two_histograms_share_nothing() -> None:
    first, second = Histogram(BOUNDS), Histogram(BOUNDS)
    first.add(1.0)
    assert second.observations == 0
