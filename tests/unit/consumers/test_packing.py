"""Tests that packing depends on the batch only."""

import random

from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.consumers.learners.layout import MicroBatch, RowSize, lines_of, pack
from dora_pipe.consumers.learners.step import minibatches

lengths = st.lists(st.integers(1, 300), min_size=1, max_size=80)
limits = st.integers(1, 4000)


def rows(tokens: list[int]) -> list[RowSize]:
    return [RowSize(ordinal=i // 4, sample=i % 4, tokens=count) for i, count in enumerate(tokens)]


@given(lengths, limits)
def test_every_row_is_in_exactly_one_pass_and_fits(tokens: list[int], limit: int) -> None:
    packed = pack(rows(tokens), padded_tokens_max=limit)
    assert sorted(row for micro in packed for row in micro.rows) == list(range(len(tokens)))
    for micro in packed:
        assert micro.width == max(tokens[row] for row in micro.rows)
        assert len(micro.rows) * micro.width <= limit or len(micro.rows) == 1


@given(lengths, limits, st.integers(0, 1000))
def test_passes_do_not_depend_on_the_order_of_the_rows(
    tokens: list[int], limit: int, seed: int
) -> None:
    given_rows = rows(tokens)
    shuffled = random.Random(seed).sample(given_rows, len(given_rows))
    first_pack = pack(given_rows, padded_tokens_max=limit)
    other = pack(shuffled, padded_tokens_max=limit)
    assert [[given_rows[row] for row in micro.rows] for micro in first_pack] == [
        [shuffled[row] for row in micro.rows] for micro in other
    ]


@given(st.lists(st.integers(), max_size=30), st.integers(1, 10))
def test_minibatches_deal_every_group_once_and_differ_by_one_at_most(
    groups: list[int], count: int
) -> None:
    dealt = minibatches(groups, count)
    assert sorted(group for part in dealt for group in part) == sorted(groups)
    sizes = [len(part) for part in dealt]
    assert all(sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(dealt) == min(count, len(groups))


def padded(tokens: list[int], micro: MicroBatch) -> int:
    return len(lines_of([tokens[row] for row in micro.rows], micro.width)) * micro.width


@given(lengths, limits)
def test_rows_that_share_lines_are_each_in_one_pass_and_fit(tokens: list[int], limit: int) -> None:
    packed = pack(rows(tokens), padded_tokens_max=limit, packing=True)
    assert sorted(row for micro in packed for row in micro.rows) == list(range(len(tokens)))
    for micro in packed:
        assert micro.width == max(tokens[row] for row in micro.rows)
        assert padded(tokens, micro) <= limit or len(micro.rows) == 1


@given(lengths, st.integers(300, 600))
def test_no_line_is_longer_than_its_pass_is_wide(tokens: list[int], width: int) -> None:
    lines = lines_of(tokens, width)
    assert sorted(row for line in lines for row in line) == list(range(len(tokens)))
    assert all(line and sum(tokens[row] for row in line) <= width for line in lines)
    # The first row of a later line never fits in an earlier one.
    assert sum(tokens) * 2 > (len(lines) - 1) * width


def test_packing_leaves_little_padding() -> None:
    chance = random.Random(5)
    tokens = [chance.randint(10, 1000) for _ in range(256)]
    apart = pack(rows(tokens), padded_tokens_max=16_384)
    shared = pack(rows(tokens), padded_tokens_max=16_384, packing=True)
    assert sum(padded(tokens, entry) for entry in shared) < 1.07 * sum(tokens)
    assert len(shared) < len(apart)


def test_rows_of_one_trajectory_stay_in_one_pass() -> None:
    sized = [RowSize(ordinal=index, sample=0, tokens=50, others=[30, 20]) for index in range(3)]
    packed = pack(sized, padded_tokens_max=100, packing=True)
    assert [entry.rows for entry in packed] == [(0,), (1,), (2,)]
    assert [entry.rows for entry in pack(sized, padded_tokens_max=200, packing=True)] == [
        (0, 1),
        (2,),
    ]
