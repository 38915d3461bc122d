"""Values of a trajectory's places, and the place that decided it."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dora_pipe.analysis.fork import Cut, Owner, check_forkable, fork_of, mean_of
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.contexts import Call
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.batches import make_trajectory

NAME = "g0000000001-000"
OWNER = Owner(trajectory="g0000000005-002", version=7, digest="a" * 64)


def test_rewards_of_0_and_1_have_an_interval_even_where_all_are_equal() -> None:
    mean, low, high = mean_of([1.0] * 16)
    assert low is not None and high is not None
    assert (mean, round(low, 3), round(high, 6)) == (1.0, 0.806, 1.0)
    mean, low, high = mean_of([0.2, 0.4, 0.9, 0.1])
    assert low is not None and high is not None
    assert mean == pytest.approx(0.4)
    assert 0.1 <= low < 0.4 < high <= 0.9
    assert mean_of([]) == (None, None, None)


def _samples(*places: list[float | None]) -> dict[Cut, list[Trajectory]]:
    return {
        Cut(token=2 + at, turn=at): [make_trajectory(NAME, reward=one) for one in rewards]
        for at, rewards in enumerate(places)
    }


def test_the_stretch_decided_that_changed_the_value_most() -> None:
    one = make_trajectory(NAME, prompt=(4, 5), sampled=(7, 8, 9, 2), reward=0.0)
    found = fork_of("r", one, _samples([1.0] * 16, [1.0, 0.0] * 8, [0.0] * 16), OWNER)
    assert found.decided is not None
    assert (found.decided.turn, found.decided.before, found.decided.after) == (0, 1.0, 0.5)
    last = fork_of("r", one, _samples([0.0, 1.0], [1.0, 0.0]), OWNER)
    assert last.decided is not None
    assert last.decided.end == one.length, "the last turn led to the recorded reward"


def test_no_place_decided_where_intervals_overlap_and_invalid_samples_count_in_no_mean() -> None:
    one = make_trajectory(NAME, reward=None)
    found = fork_of("r", one, _samples([0.0, 1.0], [1.0, 1.0], [None, 1.0, None]), OWNER)
    assert found.decided is None
    assert (found.places[2].mean, len(found.places[2].samples)) == (1.0, 3)


def test_agents_and_groups_that_are_scored_together_are_refused_by_name() -> None:
    one = make_trajectory(NAME)
    check_forkable(one, ("eval",))
    with pytest.raises(UsageError, match=f"{NAME} is scored with its group"):
        check_forkable(one, ("train",))
    call = Call(start=3, end=6, seed=1, asked_ns=1, answered_ns=2)
    of_agent = replace(one, meta=msgspec.structs.replace(one.meta, calls=(call,)))
    with pytest.raises(UsageError, match=f"{NAME} comes from an agent"):
        check_forkable(of_agent)
