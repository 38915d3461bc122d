"""Tests of kept prefixes against a simple model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.engines.engine import Array
from dora_pipe.producers.engines.prefixes import KeptPrefixes
from dora_pipe.producers.engines.slots import Integers

WEIGHTS = ("aa", "bb")


def ids_of(tokens: Sequence[int]) -> Integers:
    return np.array(tokens, np.int64)


def computed(weights: str, tokens: Sequence[int]) -> Array:
    sums = [hash((weights, tuple(tokens[: end + 1]))) for end in range(len(tokens))]
    return np.array(sums, np.int64).reshape(1, 1, 1, len(tokens), 1)


def keep(kept: KeptPrefixes, weights: str, tokens: Sequence[int]) -> list[tuple[int, int]]:
    asked: list[tuple[int, int]] = []

    def copied(start: int, end: int) -> Array:
        asked.append((start, end))
        return computed(weights, tokens)[..., start:end, :].copy()

    kept.keep(weights, ids_of(tokens), copied)
    return asked


def find_cached(kept: KeptPrefixes, weights: str, tokens: Sequence[int]) -> int:
    cached = kept.known(weights, ids_of(tokens))
    data = kept.longest(weights, ids_of(tokens))
    assert (0 if data is None else data.shape[-2]) == cached
    if data is not None:
        np.testing.assert_array_equal(data, computed(weights, tokens[:cached]))
    return cached


def test_only_what_is_not_held_is_copied() -> None:
    kept = KeptPrefixes(tokens_max=100)
    assert keep(kept, "aa", [1, 2, 3, 4]) == [(0, 4)]
    assert keep(kept, "aa", [1, 2, 3, 4]) == []
    assert keep(kept, "aa", [1, 2, 3]) == []
    assert keep(kept, "aa", [1, 2, 9, 9]) == [(2, 4)]
    assert keep(kept, "aa", [1, 2, 3, 4, 5]) == [(4, 5)]
    assert keep(kept, "bb", [1, 2]) == [(0, 2)]
    assert kept.tokens == 4 + 2 + 1 + 2


def test_longest_common_beginning_is_found_also_in_the_middle_of_what_was_kept() -> None:
    kept = KeptPrefixes(tokens_max=100)
    keep(kept, "aa", [1, 2, 3, 4, 5, 6])
    assert find_cached(kept, "aa", [1, 2, 3, 9]) == 3
    assert find_cached(kept, "aa", [1, 2, 3, 4, 5, 6, 7, 8]) == 6
    assert (
        find_cached(kept, "aa", [2, 3])
        == find_cached(kept, "bb", [1, 2])
        == find_cached(kept, "aa", [])
        == 0
    )


def test_what_was_not_used_for_longest_goes_first_and_ends_before_beginnings() -> None:
    kept = KeptPrefixes(tokens_max=8)
    keep(kept, "aa", [1, 1, 1, 1])
    keep(kept, "aa", [1, 1, 2, 2])
    keep(kept, "aa", [5, 5])
    assert kept.tokens == 8
    find_cached(kept, "aa", [1, 1, 1, 1])
    keep(kept, "aa", [7])
    assert find_cached(kept, "aa", [1, 1, 2, 2]) == 2
    assert find_cached(kept, "aa", [1, 1, 1, 1]) == 4
    assert find_cached(kept, "aa", [5, 5]) == 2


def test_sequence_beyond_the_bound_is_not_kept_and_pushes_nothing_out() -> None:
    kept = KeptPrefixes(tokens_max=3)
    keep(kept, "aa", [1, 2, 3])
    assert keep(kept, "aa", [4, 5, 6, 7]) == []
    assert find_cached(kept, "aa", [1, 2, 3]) == 3


SEQUENCES = st.lists(st.integers(0, 2), max_size=9)
WORKS = st.lists(
    st.tuples(st.sampled_from(("keep", "find", "retain")), st.sampled_from(WEIGHTS), SEQUENCES)
)


@given(st.integers(0, 30), WORKS)
def test_held_tokens_are_those_of_the_tree_and_never_more_than_the_bound(
    tokens_max: int, works: list[tuple[str, str, list[int]]]
) -> None:
    kept = KeptPrefixes(tokens_max=tokens_max)
    for what, weights, tokens in works:
        if what == "keep":
            keep(kept, weights, tokens)
            if len(tokens) <= tokens_max:
                assert find_cached(kept, weights, tokens) == len(tokens)
        elif what == "find":
            find_cached(kept, weights, tokens)
        else:
            kept.retain({weights})
        assert kept.tokens == _tokens(kept) <= tokens_max


def _tokens(kept: KeptPrefixes) -> int:
    roots: list[Any] = [child for root in kept._roots.values() for child in root.children.values()]
    total = 0
    while roots:
        edge = roots.pop()
        assert len(edge.ids) == edge.data.shape[-2] > 0
        assert all(child.parent is edge for child in edge.children.values())
        total += len(edge.ids)
        roots += edge.children.values()
    return total
