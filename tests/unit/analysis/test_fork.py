"""Tests of fork: values of positions and the decisive one."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dora_pipe.analysis.fork import Decided, ForkedTurn, check_forkable, decided_by, mean_of
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.contexts import Call
from tests.support.batches import make_trajectory

NAME = "g0000000001-000"


def test_rewards_of_0_and_1_have_an_interval_even_where_all_are_equal() -> None:
    mean, low, high = mean_of([1.0] * 16)
    assert low is not None and high is not None
    assert (mean, round(low, 3), round(high, 6)) == (1.0, 0.806, 1.0)
    mean, low, high = mean_of([0.2, 0.4, 0.9, 0.1])
    assert low is not None and high is not None
    assert mean == pytest.approx(0.4)
    assert 0.1 <= low < 0.4 < high <= 0.9
    assert mean_of([]) == (None, None, None)


def turns(*rewards: list[float]) -> list[ForkedTurn]:
    results = []
    for index, reward in enumerate(rewards):
        mean, low, high = mean_of(reward)
        results.append(
            ForkedTurn(token=2 + index, turn=index, mean=mean, low=low, high=high, samples=())
        )
    return results


@pytest.mark.parametrize(
    ("rewards", "recorded", "decided"),
    [
        (([1.0] * 16, [1.0, 0.0] * 8, [0.0] * 16), 0.0, Decided(turn=0, before=1.0, after=0.5)),
        (([0.0, 1.0], [1.0, 0.0]), 0.0, Decided(turn=1, before=0.5, after=0.0)),
        (([0.0, 1.0], [1.0, 1.0], [1.0]), None, None),
        (([1.0] * 16, [], [0.0] * 16), None, Decided(turn=0, before=1.0, after=0.0)),
        (([1.0] * 16,), 0.0, None),
    ],
    ids=["the largest change", "the last turn", "overlap", "a turn without rewards", "one turn"],
)
def test_the_turn_decided_that_changed_the_value_most(
    rewards: tuple[list[float], ...], recorded: float | None, decided: Decided | None
) -> None:
    assert decided_by(turns(*rewards), recorded) == decided


def test_agents_and_groups_that_are_scored_together_are_refused_by_name() -> None:
    trajectory = make_trajectory(NAME)
    check_forkable(trajectory, ("eval",))
    with pytest.raises(UsageError, match=f"{NAME} has a group reward"):
        check_forkable(trajectory, ("train",))
    call = Call(start=3, end=6, seed=1, asked_ns=1, answered_ns=2)
    of_agent = replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, calls=(call,)))
    with pytest.raises(UsageError, match=f"{NAME} comes from an agent"):
        check_forkable(of_agent)
