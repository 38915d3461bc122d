"""Addresses as people and scripts send them: what can be read, and what is refused in a line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.core.errors import UsageError
from dora_pipe.observe.web.view import FIELDS_MAX, TEXT_MAX, parse_query


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
        parse_query("?" + "&".join(f"a{one}=1" for one in range(FIELDS_MAX + 1)))


@given(st.text(max_size=200))
def test_any_address_is_read_or_refused(address: str) -> None:
    try:
        asked = parse_query(address)
        asked.whole("n")
    except UsageError as error:
        assert error.message
    else:
        assert all(asked.path)
