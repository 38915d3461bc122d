"""Tests of Gymnasium spaces as text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.producers.adapters.spaces import NotRead, read, say, unread, unsaid


def boxes() -> st.SearchStrategy[spaces.Box]:
    shapes = st.sampled_from([(), (1,), (3,), (2, 2)])
    return shapes.map(lambda shape: spaces.Box(-4.0, 4.0, shape, np.float32))


def acted() -> st.SearchStrategy[Any]:
    sizes = st.integers(1, 9)
    return st.one_of(
        st.builds(lambda n, start: spaces.Discrete(n, start=start), sizes, st.integers(-3, 3)),
        st.lists(sizes, min_size=1, max_size=4).map(spaces.MultiDiscrete),
        sizes.map(spaces.MultiBinary),
        boxes(),
    )


@given(space=acted(), seed=st.integers(0, 1000))
def test_an_action_that_was_said_is_read_again(space: Any, seed: int) -> None:
    space.seed(seed)
    action = space.sample()
    assert not unread(space)
    again = read(space, say(space, action))
    assert space.contains(again)
    assert np.allclose(again, action, atol=1e-3)


@given(space=acted(), text=st.text(max_size=40))
def test_a_text_is_an_action_of_the_space_or_is_not_read(space: Any, text: str) -> None:
    try:
        assert space.contains(read(space, text))
    except NotRead as error:
        assert str(error)


def test_the_last_name_in_a_text_is_the_action() -> None:
    space = spaces.Discrete(3)
    names = ("up", "down", "pick up")
    assert read(space, "I could go down. Action: UP", names) == 0
    assert read(space, "up or pick up", names) == 2
    with pytest.raises(NotRead, match="one of up, down, pick up"):
        read(space, "upwards", names)
    assert say(space, 2, names) == "pick up"


def test_parts_of_an_observation_stand_behind_their_names() -> None:
    space = spaces.Dict(
        {
            "at": spaces.Tuple([spaces.Discrete(4), spaces.Discrete(4)]),
            "speed": spaces.Box(-1.0, 1.0, (2,), np.float32),
            "said": spaces.Text(8),
        }
    )
    value = {"at": (1, 2), "speed": np.array([-0.00001, 0.5], np.float32), "said": "hi"}
    assert not unsaid(space)
    assert say(space, value) == "at: 1 2\nsaid: hi\nspeed: 0.000 0.500"
    assert unread(space) == "actions of Dict cannot be read"


def test_numbers_that_are_too_many_too_few_or_beyond_are_not_read() -> None:
    space = spaces.Box(-1.0, 1.0, (2,), np.float32)
    assert read(space, "steer 0.5, throttle -1e-1").tolist() == pytest.approx([0.5, -0.1])
    for text in ("0.5", "1 2 3", "0.5 7", "nan nan", ""):
        with pytest.raises(NotRead):
            read(space, text)
    with pytest.raises(NotRead, match="whole numbers"):
        read(spaces.MultiDiscrete([3, 3]), "1.5 1")
