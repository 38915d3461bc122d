"""Tests of identities from ordinals: pinned, reversible, each prompt once per incarnation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import SchemaError
from dora_pipe.schemas.identity import (
    SAMPLES_MAX,
    Purpose,
    derive_seed,
    group_id,
    group_of,
    group_seed,
    parse_trajectory_id,
    partition_of,
    prompt_index,
    trajectory_id,
    trajectory_seed,
)

PURPOSES = st.sampled_from(["train", "eval"])
ORDINALS = st.integers(0, 10**10 - 1)


@given(PURPOSES, ORDINALS, st.integers(0, 999))
def test_trajectory_id_parses_back(purpose: Purpose, ordinal: int, sample: int) -> None:
    group = group_id(purpose, ordinal)
    trajectory = trajectory_id(group, sample)
    assert parse_trajectory_id(trajectory) == (purpose, ordinal, sample)
    assert group_of(trajectory) == group


@given(st.lists(st.tuples(ORDINALS, st.integers(0, 999)), max_size=20))
def test_ids_sort_as_their_ordinals_and_samples_do(pairs: list[tuple[int, int]]) -> None:
    ids = [trajectory_id(group_id("train", ordinal), sample) for ordinal, sample in pairs]
    assert sorted(ids) == [
        trajectory_id(group_id("train", ordinal), sample) for ordinal, sample in sorted(pairs)
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "g1-2",
        "x0000000042-003",
        "g0000000042",
        "g0000000042-3",
        "g-003",
        " g0000000042-003",
        "g0000000042-003\n",
        "g\u0660000000042-003",
    ],
)
def test_text_that_is_no_trajectory_id_is_refused(text: str) -> None:
    with pytest.raises(SchemaError, match="not a trajectory id"):
        parse_trajectory_id(text)


@pytest.mark.parametrize("ordinal", [-1, 10**10])
def test_ordinal_without_an_id_is_our_own_mistake(ordinal: int) -> None:
    with pytest.raises(AssertionError):
        group_id("train", ordinal)


@pytest.mark.parametrize("sample", [-1, SAMPLES_MAX])
def test_sample_without_an_id_is_our_own_mistake(sample: int) -> None:
    with pytest.raises(AssertionError):
        trajectory_id("g0000000042", sample)


@given(st.integers(0, 2**63 - 1), st.integers(0, 9), st.integers(1, 300))
def test_every_row_comes_once_per_data_epoch(run_seed: int, data_epoch: int, rows: int) -> None:
    ordinals = range(data_epoch * rows, (data_epoch + 1) * rows)
    drawn = [prompt_index(run_seed, ordinal, rows) for ordinal in ordinals]
    assert {incarnation for incarnation, _ in drawn} == {data_epoch}
    assert sorted(row for _, row in drawn) == list(range(rows))


def test_data_epochs_and_runs_have_different_orders() -> None:
    orders = {
        tuple(prompt_index(seed, incarnation * 50 + index, 50)[1] for index in range(50))
        for seed in (1, 2)
        for incarnation in (0, 1)
    }
    assert len(orders) == 4


def test_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        prompt_index(0, 0, 0)


def test_order_of_prompts_is_pinned() -> None:
    assert [prompt_index(7, ordinal, 10) for ordinal in range(12)] == [
        *((0, row) for row in (2, 9, 6, 8, 7, 4, 0, 5, 1, 3)),
        (1, 7),
        (1, 1),
    ]


def test_seeds_are_pinned() -> None:
    assert derive_seed("a", 1) == 4742018630964328543
    assert group_seed(7, "train", 42) == 2992087827236195719
    assert group_seed(7, "eval", 42) == 2319786854783727814
    assert trajectory_seed(group_seed(7, "train", 42), 3) == 831174773993722245


@given(st.lists(st.integers() | st.text(max_size=5), max_size=4))
def test_seed_fits_into_63_bits(parts: list[int | str]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


def test_seeds_of_samples_groups_and_purposes_differ() -> None:
    purposes: tuple[Purpose, ...] = ("train", "eval")
    seeds = {
        trajectory_seed(group_seed(run, purpose, ordinal), sample)
        for run in range(3)
        for purpose in purposes
        for ordinal in range(10)
        for sample in range(8)
    }
    assert len(seeds) == 3 * 2 * 10 * 8


@given(ORDINALS, st.integers(1, 64))
def test_partition_is_one_of_the_topics(ordinal: int, partitions: int) -> None:
    assert 0 <= partition_of(ordinal, partitions) < partitions
    assert partition_of(ordinal + partitions, partitions) == partition_of(ordinal, partitions)
