"""Tests of group advantages and minibatch weights."""

import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.objectives import Averaging
from dora_pipe.consumers.objectives.advantage import (
    STD_FLOOR,
    batch_advantages,
    group_advantages,
    leave_one_out_advantages,
    token_weights,
    version_advantages,
)

rewards = st.lists(
    st.one_of(st.none(), st.floats(-10, 10, allow_subnormal=False)), min_size=1, max_size=12
)


def test_advantage_is_distance_from_the_group_mean_in_standard_deviations() -> None:
    advantages = group_advantages([1.0, 0.0, 0.0, 0.0], divide_by_std=True)
    scale = statistics.stdev([1.0, 0.0, 0.0, 0.0]) + STD_FLOOR
    assert advantages == pytest.approx([0.75 / scale, *[-0.25 / scale] * 3], rel=1e-12)


def test_invalid_sample_stays_none_and_does_not_move_the_others() -> None:
    with_invalid = group_advantages([1.0, None, 0.0], divide_by_std=True)
    assert with_invalid[1] is None
    assert [with_invalid[0], with_invalid[2]] == group_advantages([1.0, 0.0], divide_by_std=True)


@pytest.mark.parametrize("values", [[0.1] * 7, [5.0], [None, 2.0], [None, None]])
def test_group_without_a_difference_has_advantages_of_exactly_zero(
    values: list[float | None],
) -> None:
    expected = [None if value is None else 0.0 for value in values]
    assert group_advantages(values, divide_by_std=True) == expected


@given(rewards, st.booleans())
def test_advantages_of_valid_samples_add_up_to_nothing_and_keep_their_order(
    values: list[float | None], divide_by_std: bool
) -> None:
    advantages = group_advantages(values, divide_by_std=divide_by_std)
    assert [advantage is None for advantage in advantages] == [value is None for value in values]
    pairs = [
        (value, advantage)
        for value, advantage in zip(values, advantages, strict=True)
        if value is not None
    ]
    sizes = [abs(entry) for _, entry in pairs if entry is not None]
    total = math.fsum(entry for _, entry in pairs if entry is not None)
    assert abs(total) <= 1e-9 * max(1.0, *sizes, 1.0) * max(1, len(pairs))
    ordered = sorted(pairs)
    assert all(
        remaining[1] is not None and right[1] is not None and remaining[1] <= right[1] + 1e-12
        for remaining, right in itertools.pairwise(ordered)
    )


@pytest.mark.parametrize("averaging", ["token-mean", "sequence-mean"])
@given(lengths=st.lists(st.integers(1, 500), min_size=1, max_size=20))
def test_weights_of_all_tokens_add_up_to_one(averaging: Averaging, lengths: list[int]) -> None:
    weights = token_weights(lengths, averaging)
    assert math.fsum(w * n for w, n in zip(weights, lengths, strict=True)) == pytest.approx(1.0)


def test_token_mean_weighs_tokens_and_sequence_mean_weighs_trajectories_alike() -> None:
    assert token_weights([1, 3], "token-mean") == [0.25, 0.25]
    assert token_weights([1, 3], "sequence-mean") == [0.5, 1 / 6]


def test_constant_weighs_every_token_alike_whatever_the_lengths_are() -> None:
    assert token_weights([1, 3, 0], "constant", tokens=10) == [1 / 30, 1 / 30, 0.0]


@given(rewards)
def test_leave_one_out_compares_each_reward_with_the_mean_of_the_others(
    values: list[float | None],
) -> None:
    advantages = leave_one_out_advantages(values, divide_by_std=False)
    valid = [index for index, value in enumerate(values) if value is not None]
    for index, value in enumerate(values):
        rest = [values[other] for other in valid if other != index]
        if value is None:
            assert advantages[index] is None
        elif not rest:
            assert advantages[index] == 0.0
        else:
            earlier_rest = [other for other in rest if other is not None]
            expected = value - math.fsum(earlier_rest) / len(earlier_rest)
            assert advantages[index] == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(st.integers(0, 2), rewards), min_size=1, max_size=5), st.booleans())
def test_version_baseline_of_one_version_is_one_large_group(
    groups: list[tuple[int, list[float | None]]], divide_by_std: bool
) -> None:
    advantages = version_advantages(groups, divide_by_std=divide_by_std)
    for version in {version for version, _ in groups}:
        pool = [value for other, values in groups if other == version for value in values]
        mine = [
            value
            for (other, _), values in zip(groups, advantages, strict=True)
            if other == version
            for value in values
        ]
        assert mine == group_advantages(pool, divide_by_std=divide_by_std)


def test_rule_of_the_configuration_is_the_one_that_is_applied() -> None:
    groups = [(0, [1.0, 0.0, 0.0]), (1, [1.0, 1.0, 0.0])]
    for values, group, single in zip(
        [values for _, values in groups],
        batch_advantages(groups, "group", True),
        batch_advantages(groups, "leave-one-out", True),
        strict=True,
    ):
        assert group == group_advantages(values, divide_by_std=True)
        assert single == leave_one_out_advantages(values, divide_by_std=True)
    assert batch_advantages(groups, "version-baseline", False) == version_advantages(
        groups, divide_by_std=False
    )
