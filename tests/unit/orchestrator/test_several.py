"""Tests of several tasks and evaluations."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.schemas.identity import next_task, whole_shares
from tests.support import orchestrator_records as records
from tests.support.orchestrator_stage import Stage

RATIO = st.one_of(
    st.integers(1, 9).map(float), st.floats(0.01, 100.0).map(lambda value: round(value, 2))
)


@given(st.lists(RATIO, min_size=1, max_size=7), st.integers(1, 200))
def test_after_any_number_of_groups_each_task_has_had_its_share_to_within_one(
    ratios: list[float], groups: int
) -> None:
    shares, given_ = whole_shares(tuple(ratios)), [0] * len(ratios)
    for number in range(1, groups + 1):
        given_[next_task(shares, given_)] += 1
        for share, count in zip(shares, given_, strict=True):
            assert abs(count - Fraction(number * share, sum(shares))) < 1


def test_ratios_are_taken_as_they_are_written() -> None:
    assert whole_shares((0.1, 0.3)) == (1, 3)
    assert whole_shares((2.0, 4.0)) == (1, 2)
    assert whole_shares((0.7,)) == (1,)


def test_a_run_without_the_rows_of_a_task_does_not_start() -> None:
    stage = Stage()
    config = records.with_several(records.make_config(), {"a": 1.0, "b": 1.0})
    started = records.run_started(config)
    del started.datasets["train/b"]
    stage.tell(started)
    assert "the number of rows of train/b is missing" in stage.state.counters.rejection
    assert stage.state.started is None
