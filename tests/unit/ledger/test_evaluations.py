"""Tests of mean@k, pass@k, maj@k and intervals against sampling."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.ledger.evaluations import (
    Sample,
    interval_of,
    majority,
    metrics_of,
    part_means,
    pass_at,
    tries_of,
)

SAMPLES = st.builds(
    Sample,
    st.sampled_from([0.0, 0.5, 1.0]),
    answer=st.sampled_from(["", "4", "5", "6"]),
    parts=st.just({}),
)
PROMPTS = st.lists(st.lists(SAMPLES, max_size=6), min_size=1, max_size=9)


def of(*rewards: float) -> list[Sample]:
    return [Sample(reward) for reward in rewards]


@pytest.mark.parametrize(
    ("samples", "share"),
    [
        ([("4", True), ("4", True), ("5", False)], 1.0),
        ([("4", True), ("4", False), ("5", True), ("5", True)], 0.75),
        ([("4", False), ("", True), ("", True)], 0.0),
        ([("", True), ("", True), ("", True)], 0.0),
    ],
)
def test_majority_is_what_the_most_frequent_answers_are_worth(
    samples: list[tuple[str, bool]], share: float
) -> None:
    assert majority(samples) == share


def test_majority_is_said_from_three_votes_on_and_where_a_reward_reads_an_answer() -> None:
    samples = [Sample(1.0, "4"), Sample(0.0, "5"), Sample(1.0, "4"), Sample(0.0, "6")]
    metrics = metrics_of([samples, of(0.0, 0.0, 0.0, 0.0)], samples=4)
    assert metrics["maj@4"] == 0.5, "who says no answer has no vote"
    assert {name for name in metrics if name.startswith("maj")} == {"maj@4"}
    assert not any(name.startswith("maj") for name in metrics_of([of(1, 1, 1)], samples=3))


def test_part_that_a_sample_does_not_have_counts_as_0() -> None:
    prompts = [[Sample(1.0, parts={"math": 1.0}), Sample(0.5, parts={"brevity": 0.5})], of(0.0)]
    metrics = metrics_of(prompts, samples=2)
    assert (metrics["part/math"], metrics["part/brevity"]) == (0.25, 0.125)


@given(st.integers(1, 7), st.data())
def test_pass_at_is_the_share_of_all_choices_that_have_a_success(
    samples: int, data: st.DataObject
) -> None:
    successes = data.draw(st.integers(0, samples))
    tries = data.draw(st.integers(1, samples))
    drawn = list(itertools.combinations([1] * successes + [0] * (samples - successes), tries))
    assert pass_at(samples, successes, tries) == pytest.approx(sum(map(max, drawn)) / len(drawn))


@pytest.mark.parametrize(
    ("samples", "tries"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_tries_are_powers_of_two_and_all(samples: int, tries: list[int]) -> None:
    assert tries_of(samples) == tries


@given(PROMPTS)
def test_figures_are_between_0_and_1_and_grow_with_the_tries(prompts: list[list[Sample]]) -> None:
    metrics = metrics_of(prompts, samples=6)
    assert all(0 <= value <= 1 for value in metrics.values())
    full_prompts = [own for own in prompts if len(own) == 6]
    grown = metrics_of(full_prompts, samples=6)
    values = [grown[name] for name in ("pass@1", "pass@2", "pass@4", "pass@6") if name in grown]
    assert values == sorted(values)


def test_what_is_not_valid_is_no_failure_and_what_nobody_can_say_is_left_out() -> None:
    assert metrics_of([of(1.0), []], samples=2) == {"mean@2": 1.0, "pass@1": 1.0}
    assert metrics_of([[]], samples=2) == {}


def test_interval_is_the_same_again_and_as_wide_as_the_normal_one() -> None:
    values = [float(index % 2) for index in range(400)]
    interval = interval_of(values)
    assert interval == interval_of(values)
    assert interval.value == 0.5
    width = 2 * 1.96 * 0.5 / math.sqrt(400)
    assert interval.high - interval.low == pytest.approx(width, rel=0.1)
    assert interval_of([0.25]).low == interval_of([0.25]).high == 0.25


def test_means_of_parts_leave_out_what_abstained() -> None:
    samples = [
        Sample(1.0, "", {"sums": 1.0, "sums.read": 1.0}),
        Sample(0.0, "", {"sums": 0.0, "rivers": 0.5}),
        Sample(1.0, "", {"sums.abstained": 1.0, "rivers": 1.0}),
    ]
    assert part_means(samples) == {
        "sums": 0.5,
        "sums.read": 0.5,
        "sums.abstained": pytest.approx(1 / 3),
        "rivers": 0.5,
    }
