"""Tests of page addresses and short sums."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web.view import (
    FIELDS_MAX,
    TEXT_MAX,
    parse_query,
    seconds,
    short,
    spaced,
)


def test_path_and_fields_are_taken_apart() -> None:
    asked = parse_query("/0/trajectories?worker=w1&tokens_min=5&reward_min=.5&q=g0%2D")
    assert asked.path == ("0", "trajectories")
    assert asked.text("worker") == "w1"
    assert asked.whole("tokens_min") == 5
    assert asked.number("reward_min") == 0.5
    assert asked.text("q") == "g0-"
    assert (asked.whole("nothing", 7), asked.number("nothing")) == (7, None)


@pytest.mark.parametrize("address", ["?n=x", "?n=1.5", "?n=" + "1" * (TEXT_MAX + 1)])
def test_what_is_no_whole_number_is_refused(address: str) -> None:
    with pytest.raises(UsageError):
        parse_query(address).whole("n")


def test_too_many_fields_are_refused() -> None:
    with pytest.raises(UsageError):
        parse_query("?" + "&".join(f"a{index}=1" for index in range(FIELDS_MAX + 1)))


@given(st.text(max_size=200))
def test_any_address_is_read_or_refused(address: str) -> None:
    try:
        asked = parse_query(address)
        asked.whole("n")
    except UsageError as error:
        assert error.message
    else:
        assert all(asked.path)


FLOATS = st.floats(-1e9, 1e9, allow_nan=False)


@given(st.lists(st.integers(), min_size=1, max_size=300), st.integers(2, 40))
def test_spaced_keeps_both_ends_and_the_order(values: list[int], most: int) -> None:
    position = spaced(list(range(len(values))), most)
    assert len(position) <= most
    assert position == sorted(set(position))
    assert (position[0], position[-1]) == (0, len(values) - 1)


def test_what_is_not_there_stays_none() -> None:
    assert short(None) is None
    assert seconds(0, 5) is None and seconds(None, 5) is None


def test_numbers_are_cut_to_digits_that_count() -> None:
    assert short(0.000123456) == 0.0001235
    assert short(123456.0) == 123500.0
    assert seconds(2_345_678_900, 1_000_000_000) == 1.346
