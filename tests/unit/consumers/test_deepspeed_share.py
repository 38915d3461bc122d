"""Every pass has one rank, ranks have about equal work, and the same batch is cut the same way."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.consumers.learners.deepspeed.commands import shares
from dora_pipe.consumers.learners.settings import MICRO_BATCH_TOKENS, StepSettings, step_settings
from dora_pipe.consumers.learners.step import Item, Pass, items_of, passes_of
from tests.support.batches import SETTINGS, make_batch


def _step(tokens: int) -> StepSettings:
    return step_settings({**SETTINGS, MICRO_BATCH_TOKENS: tokens})


def _passes(seed: int, groups: int, tokens: int) -> list[Pass]:
    batch = make_batch(seed=seed, groups=groups)
    items = [item for group in items_of(batch, _step(tokens)) for item in group]
    return passes_of(items, 0, _step(tokens))


def _who(passes: list[Pass]) -> list[str]:
    return [item.trajectory.trajectory for one in passes for item in one.items]


@given(
    seed=st.integers(0, 1000),
    groups=st.integers(1, 5),
    tokens=st.sampled_from([64, 200, 4096]),
    ranks=st.integers(1, 5),
    rounds=st.integers(1, 4),
)
def test_every_trajectory_is_trained_by_one_rank_with_its_weight(
    seed: int, groups: int, tokens: int, ranks: int, rounds: int
) -> None:
    passes = _passes(seed, groups, tokens)
    found = shares(passes, ranks=ranks, rounds_min=rounds)
    assert len(found) == ranks
    mine = [one for own in found for one in own]
    assert sorted(_who(mine)) == sorted(_who(passes))
    weights = {item.trajectory.trajectory: w for p in passes for item, w in _rows(p)}
    assert all(weights[item.trajectory.trajectory] == w for one in mine for item, w in _rows(one))
    assert sorted(one.number for one in mine) == list(range(len(mine)))
    assert all(len(one.items) == len(one.micro.rows) for one in mine)
    assert all(one.micro.padded_tokens <= tokens or len(one.items) == 1 for one in mine)
    counts = [len(own) for own in found]
    assert max(counts) - min(counts) <= 1
    rows = len(_who(passes))
    assert len(mine) >= min(ranks * rounds, rows)


def _rows(one: Pass) -> list[tuple[Item, float]]:
    return list(zip(one.items, one.weights, strict=True))


def test_order_of_the_passes_does_not_matter() -> None:
    passes = _passes(3, 4, 200)
    shuffled = passes[:]
    random.Random(0).shuffle(shuffled)
    first, second = (shares(some, ranks=2) for some in (passes, shuffled))
    assert [_who(own) for own in first] == [_who(own) for own in second]


def test_one_rank_without_a_wish_has_the_passes_as_they_are() -> None:
    passes = _passes(5, 3, 200)
    (own,) = shares(passes, ranks=1)
    assert sorted(one.micro.padded_tokens for one in own) == sorted(
        one.micro.padded_tokens for one in passes
    )
    assert sorted(_who(own)) == sorted(_who(passes))


@pytest.mark.parametrize("ranks", [2, 3])
def test_passes_of_one_round_are_of_about_equal_size(ranks: int) -> None:
    found = shares(_passes(7, 5, 128), ranks=ranks)
    sizes = [one.micro.padded_tokens for own in found for one in own]
    for round_ in zip(*found, strict=False):
        of_round = [one.micro.padded_tokens for one in round_]
        between = [size for size in sizes if min(of_round) < size < max(of_round)]
        assert len(between) <= ranks


def test_update_without_a_gradient_has_no_pass_on_any_rank() -> None:
    assert shares([], ranks=2) == [[], []]
