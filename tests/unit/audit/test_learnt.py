"""Two versions are compared by the draws that both have a value of."""

from __future__ import annotations

import pytest

from dora_pipe.audit.learnt import learnt
from dora_pipe.core.errors import UsageError


def test_a_version_is_compared_draw_by_draw() -> None:
    found = learnt([1.0, 0.0, 1.0, 1.0], [0.5, -0.5, 0.5, 0.5])
    assert (found.draws, found.value.value, found.source.value) == (4, 0.75, 0.25)
    assert (found.gain.low, found.gain.value, found.gain.high) == (0.5, 0.5, 0.5)
    assert found.value.low < 0.75 < found.value.high, "the rows differ, and the pairs do not"


def test_a_draw_without_a_reward_under_one_of_them_counts_for_neither() -> None:
    found = learnt([1.0, None, 0.0], [1.0, 1.0, None])
    assert (found.draws, found.value.value, found.source.value) == (1, 1.0, 1.0)


def test_without_a_pair_nothing_is_said() -> None:
    with pytest.raises(UsageError, match="no value"):
        learnt([1.0, None], [None, 1.0])
