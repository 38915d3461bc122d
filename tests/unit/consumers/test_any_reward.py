"""Tests that every accepted reward is trainable by all objectives."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_pipe.config.objectives import Advantage
from dora_pipe.consumers.learners.simulated import SimulatedLearner
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.core.errors import NonFinite
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.server import scored
from dora_pipe.schemas.wire import REWARD_MAX
from tests.support.batches import SETTINGS, make_batch

RULES: tuple[Advantage, ...] = ("group", "leave-one-out", "version-baseline")
anything = st.floats(allow_nan=False, allow_infinity=False)
likely = st.one_of(anything, st.floats(-REWARD_MAX, REWARD_MAX), st.just(REWARD_MAX))


def taken(reward: float) -> float | None:
    try:
        return scored("r", reward).reward
    except NoAnswer:
        return None


@given(likely)
def test_what_the_tasks_process_takes_is_what_every_objective_can_train(reward: float) -> None:
    result = taken(reward)
    assert result is None or abs(result) <= REWARD_MAX
    assert (result is None) == (abs(reward) > REWARD_MAX)


@pytest.mark.parametrize("advantage", RULES)
@pytest.mark.parametrize("divided", [False, True])
@given(rewards=st.lists(st.one_of(st.none(), anything), min_size=1, max_size=6))
def test_what_an_old_log_holds_has_finite_advantages_or_is_named(
    advantage: Advantage, divided: bool, rewards: list[float | None]
) -> None:
    try:
        (actual_advantage,) = batch_advantages([(0, rewards)], advantage, divided)
    except NonFinite as error:
        assert "a reward of size" in error.message
        assert "fail-batch" in str(error.hint)
    else:
        assert all(
            math.isfinite(torch.tensor(entry)) for entry in actual_advantage if entry is not None
        )


def test_a_trainer_says_of_an_old_logs_huge_reward_that_it_cannot_be_trained() -> None:
    batch = make_batch(seed=1, groups=1)
    first, *rest = batch.groups[0].trajectories
    group = replace(batch.groups[0], trajectories=[replace(first, reward=1e200), *rest])
    batch = replace(batch, groups=[group])
    settings: dict[str, Any] = {**SETTINGS, "objective.kind": "grpo"}
    with pytest.raises(NonFinite, match=r"a reward of size 1e\+200") as caught:
        SimulatedLearner().train(batch, settings)
    assert "fail-batch" in str(caught.value.hint)
