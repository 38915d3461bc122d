"""Advantages of turns: what each did to the value of its episode, and together what the episode
came to beside its siblings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.consumers.learners.deepspeed.commands import pass_command
from dora_pipe.consumers.learners.port import TrainBatch
from dora_pipe.consumers.learners.step import items_of, updates_of
from dora_pipe.consumers.learners.step_figures import Sums, figures_of
from dora_pipe.consumers.objectives.advantage import leave_one_out_advantages
from dora_pipe.consumers.objectives.turns import turn_advantages
from dora_pipe.consumers.trainer.changed_batch import BatchChange, changed
from dora_pipe.schemas.trajectory import Trajectory
from dora_pipe.schemas.turn_values import TurnValue, turn_places
from tests.support.batches import make_batch
from tests.support.contexts import in_two_turns
from tests.unit.consumers.test_training_contexts import Policy, step_of

values = st.floats(-2, 2)


@given(values, values, st.lists(values, max_size=4))
def test_advantages_of_turns_add_up_to_that_of_the_episode(
    reward: float, advantage: float, known: list[float]
) -> None:
    places = [(10 * (at + 1), value) for at, value in enumerate(known)]
    one_each = [5 + 10 * at for at in range(len(known) + 1)]
    found = turn_advantages(reward, advantage, places, one_each)
    assert sum(found) == pytest.approx(advantage, abs=1e-9)


def test_a_token_has_the_difference_of_the_values_around_its_turn() -> None:
    assert turn_advantages(0.0, -0.5, [(10, 1.0)], [4, 9, 10, 12]) == [0.5, 0.5, -1.0, -1.0]
    assert turn_advantages(1.0, 0.25, [], [3, 4]) == [0.25, 0.25]


def _valued(batch: TrainBatch, value: Callable[[float, float], float]) -> TrainBatch:
    """Episodes of two turns whose second began where `value` says, of reward and advantage."""
    return replace(
        batch, groups=[replace(one, trajectories=_of(one, value)) for one in batch.groups]
    )


def _of(group: object, value: Callable[[float, float], float]) -> list[Trajectory]:
    rows: list[Trajectory] = list(group.trajectories)  # type: ignore[attr-defined]
    worth = leave_one_out_advantages([one.reward for one in rows], divide_by_std=False)
    found: list[Trajectory] = []
    for one, advantage in zip(rows, worth, strict=True):
        if one.reward is not None and advantage is not None:
            token = list(turn_places(one.segments).values())[1]
            mean = value(one.reward, advantage)
            of_turn = TurnValue(token=token, mean=mean, samples=4, sampled=9)
            one = replace(one, meta=msgspec.structs.replace(one.meta, turn_values=(of_turn,)))
        found.append(one)
    return found


def _batch() -> TrainBatch:
    return in_two_turns(make_batch(seed=5, step=0, groups=3, siblings=4))


def test_tokens_of_a_turn_get_its_advantage_and_those_without_values_that_of_the_episode() -> None:
    step = step_of(advantage="turns")
    items = [one for group in items_of(_valued(_batch(), lambda r, a: 0.25), step) for one in group]
    plain = [one for group in items_of(_batch(), step) for one in group]
    valued = [one for one in items if one.by_turn is not None]
    assert valued
    for one, other in zip(items, plain, strict=True):
        assert one.advantage == other.advantage
        assert other.by_turn is None
    for one in valued:
        reward, advantage = one.trajectory.reward, one.advantage
        assert one.by_turn is not None and reward is not None and advantage is not None
        assert {*one.by_turn} == {0.25 - (reward - advantage), reward - 0.25}
        assert len(one.by_turn) == one.counted
    figures = figures_of(items, Sums(), step)
    assert figures["turn_valued_share"] == len(valued) / len(items)
    assert figures["turn_value_tokens"] == 9.0 * len(valued)


def test_an_episode_that_is_worth_what_its_siblings_are_still_has_turns_to_learn_from() -> None:
    even = make_batch(seed=5, step=0, groups=1, siblings=4)
    rows = [replace(one, reward=1.0) for one in even.groups[0].trajectories]
    rows = [replace(one, meta=msgspec.structs.replace(one.meta, reward_error=None)) for one in rows]
    even = in_two_turns(replace(even, groups=[replace(even.groups[0], trajectories=rows)]))
    step = step_of(advantage="turns")
    _, nothing = updates_of(even, step)
    _, something = updates_of(_valued(even, lambda r, a: 0.5), step)
    assert [passes for passes in nothing if passes] == []
    (commanded,) = [pass_command(one, {}) for passes in something for one in passes]
    assert {value for unit in commanded.units for value in unit.advantages} == {-0.5, 0.5}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return Policy(tmp_path_factory.mktemp("policy"))


def test_half_an_advantage_for_each_of_two_turns_is_half_a_gradient(policy: Policy) -> None:
    halves = _valued(_batch(), lambda reward, advantage: reward - advantage / 2)
    keys: dict[str, Any] = {"clip_low": 0.9, "clip_high": 9.0}
    _, whole = policy.step(_batch(), advantage="leave-one-out", advantage_std=False, **keys)
    _, found = policy.step(halves, advantage="turns", **keys)
    largest = max(np.abs(gradient).max() for gradient in whole.values())
    assert largest > 0
    for name, gradient in whole.items():
        assert np.allclose(found[name], gradient / 2, atol=1e-5 * largest), name


def test_another_reward_takes_the_values_of_the_one_that_was_with_it(tmp_path: Path) -> None:
    batch = _valued(_batch(), lambda r, a: 0.5)
    one = next(one for one in batch.groups[0].trajectories if one.meta.turn_values)
    assert one.reward is not None
    found = changed(batch, BatchChange(rewards={one.trajectory: one.reward + 1.0}))
    again = {each.trajectory: each for each in found.groups[0].trajectories}
    assert again[one.trajectory].meta.turn_values == ()
    same = changed(batch, BatchChange(rewards={one.trajectory: one.reward}))
    assert same is batch
