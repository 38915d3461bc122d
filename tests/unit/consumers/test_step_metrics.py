"""Tests of step metrics of the entire batch, with or without gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from dora_pipe.consumers.learners.step import items_of
from dora_pipe.consumers.learners.step_metrics import Sums, metrics_of
from dora_pipe.schemas.context_tokens import counted_places
from dora_pipe.schemas.control import FinishReason
from dora_pipe.schemas.trajectory import Trajectory
from tests.support.batches import make_batch
from tests.unit.consumers.test_training_contexts import step_of


def _ends(trajectory: Trajectory, finish: FinishReason) -> Trajectory:
    return replace(trajectory, meta=msgspec.structs.replace(trajectory.meta, finish=finish))


@pytest.mark.parametrize("reward", [1.0, None])
def test_entropy_and_truncated_share_are_of_all_trajectories(reward: float | None) -> None:
    batch = make_batch(seed=5, step=0, groups=2, samples=4)
    finishes: tuple[FinishReason, ...] = ("length", "stop", "environment", "length")
    groups = [
        replace(
            group,
            trajectories=[
                replace(_ends(trajectory, finish), reward=reward)
                for trajectory, finish in zip(group.trajectories, finishes, strict=True)
            ],
        )
        for group in batch.groups
    ]
    step = step_of()
    items = [item for group in items_of(replace(batch, groups=groups), step) for item in group]
    metrics = metrics_of(items, Sums(), step)
    sampled = [
        logprob
        for item in items
        for logprob in np.asarray(item.trajectory.logprobs, float)[counted_places(item.trajectory)]
    ]
    assert metrics["truncated"] == 0.5
    assert metrics["entropy"] == pytest.approx(-math.fsum(sampled) / len(sampled))
    assert metrics["updates"] == 0
