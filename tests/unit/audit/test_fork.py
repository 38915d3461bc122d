"""Where a trajectory is cut, and what rewards of continuations say its places are worth."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from dora_pipe.audit.fork import (
    Continued,
    Cut,
    Owner,
    check_forkable,
    cut_at,
    cuts_of_pieces,
    fork_of,
    prefix_of,
    value_of,
)
from dora_pipe.core.errors import UsageError
from dora_pipe.schemas.contexts import Call
from dora_pipe.schemas.trajectory import Progress
from tests.support.batches import make_trajectory

NAME = "g0000000001-000"
OWNER = Owner(trajectory="g0000000005-002", version=7, digest="a" * 64)


def test_rewards_of_0_and_1_have_an_interval_also_where_all_are_equal() -> None:
    found = value_of([1.0] * 16)
    assert found is not None
    assert (found.mean, round(found.low, 3), round(found.high, 6)) == (1.0, 0.806, 1.0)
    half = value_of([0.0, 1.0] * 8)
    assert half is not None
    assert (half.mean, round(half.low, 3), round(half.high, 3)) == (0.5, 0.28, 0.72)


def test_other_rewards_have_the_interval_of_resampled_means() -> None:
    found = value_of([0.2, 0.4, 0.9, 0.1])
    assert found is not None
    assert found.mean == pytest.approx(0.4)
    assert 0.1 <= found.low < 0.4 < found.high <= 0.9
    assert value_of([]) is None


def test_a_single_turn_falls_into_pieces_of_as_many_tokens() -> None:
    one = make_trajectory(NAME, prompt=(4, 5), sampled=tuple(range(10, 18)))
    assert [cut.token for cut in cuts_of_pieces(one, 4)] == [2, 4, 6, 8]
    assert [cut.token for cut in cuts_of_pieces(one, 3)] == [2, 4, 7]
    with pytest.raises(UsageError, match="8 sampled tokens, not 9 pieces"):
        cuts_of_pieces(one, 9)


def test_what_stands_before_a_cut_is_handed_over_as_the_new_requests_own() -> None:
    one = make_trajectory(NAME, prompt=(4, 5), sampled=(7, 8, 9, 2))
    assert prefix_of(one, cut_at(one, 2), OWNER, episode=False) is None
    found = prefix_of(one, cut_at(one, 4), OWNER, episode=False)
    assert isinstance(found, Progress)
    assert list(found.token_ids) == [7, 8]
    assert (found.trajectory, found.version, found.digest) == ("g0000000005-002", 7, "a" * 64)


def _values(*places: list[float]) -> dict[Cut, list[Continued]]:
    return {
        Cut(token=2 + at, turn=at): [Continued(reward=one, sampled=3) for one in rewards]
        for at, rewards in enumerate(places)
    }


def test_the_place_decided_behind_which_the_value_is_another() -> None:
    one = make_trajectory(NAME, prompt=(4, 5), sampled=(7, 8, 9, 2), reward=0.0)
    found = fork_of("r", one, _values([1.0] * 16, [1.0, 0.0] * 8, [0.0] * 16), OWNER)
    assert found.decided is not None
    assert (found.decided.turn, found.decided.before, found.decided.after) == (0, 1.0, 0.5)
    assert [turn.sampled for turn in found.turns] == [48, 48, 48]
    even = fork_of("r", one, _values([0.0, 1.0], [1.0, 0.0]), OWNER)
    assert even.decided is not None
    assert even.decided.end == one.length, "what came last led to the reward itself"


def test_no_place_stands_out_where_intervals_meet() -> None:
    one = make_trajectory(NAME, reward=None)
    found = fork_of("r", one, _values([0.0, 1.0], [1.0, 1.0], [0.0, 1.0]), OWNER)
    assert found.decided is None


def test_continuations_without_a_reward_are_counted_and_enter_no_mean() -> None:
    one = make_trajectory(NAME)
    samples = [Continued(reward=reward, sampled=2) for reward in (None, 1.0, None)]
    (turn,) = fork_of("r", one, {Cut(token=3, turn=0): samples}, OWNER).turns
    assert (turn.samples, turn.invalid, turn.mean) == (3, 2, 1.0)
    assert turn.rewards == (None, 1.0, None)


def test_agents_and_siblings_that_are_scored_together_are_refused_by_name() -> None:
    one = make_trajectory(NAME)
    check_forkable(one, ("eval",))
    with pytest.raises(UsageError, match=f"siblings of {NAME} are scored together"):
        check_forkable(one, ("train",))
    call = Call(start=3, end=6, seed=1, asked_ns=1, answered_ns=2)
    of_agent = replace(one, meta=msgspec.structs.replace(one.meta, calls=(call,)))
    with pytest.raises(UsageError, match=f"{NAME} is of an agent, whose own process"):
        check_forkable(of_agent)
