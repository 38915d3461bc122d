"""Objectives, advantages and masks against verl's `core_algos` and rollout correction."""

from __future__ import annotations

import math
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dora_pipe.consumers.objectives.advantage import group_advantages, leave_one_out_advantages
from dora_pipe.consumers.objectives.registry import ESTIMATES, kept_tokens
from tests.objectives_reference.rectangle import (
    LENGTHS,
    SPREADS,
    TOKENS,
    TOLERANCE,
    Rectangle,
    difference,
    note,
)
from tests.support.objectives import random_inputs

core: Any = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="verl is not here: make test-objectives"
)
rollout: Any = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")
workers: Any = pytest.importorskip("verl.workers.config")

PACKAGE = f"verl {version('verl')}"
MEANS = {
    "token-mean": "token-mean",
    "sequence-mean": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
FAR = 1e9
"""A bound of verl's dual clip that is never reached: the papers compared here have none."""


def config(low: float, high: float) -> Any:
    config = workers.ActorConfig(
        strategy="fsdp",
        ppo_micro_batch_size_per_gpu=1,
        rollout_n=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=FAR,
    )
    config.global_batch_info["loss_scale_factor"] = TOKENS
    return config


def loss_of(
    name: str,
    box: Rectangle,
    logprobs: Tensor,
    *,
    low: float,
    high: float,
    loss: str,
    weights: Tensor | None = None,
) -> Tensor:
    tensor, _ = core.get_policy_loss_fn(name)(
        old_log_prob=box.padded(box.inputs.around),
        log_prob=box.padded(logprobs),
        advantages=box.padded(box.inputs.advantages),
        response_mask=box.mask,
        loss_agg_mode=MEANS[loss],
        config=config(low, high),
        rollout_is_weights=weights,
    )
    assert isinstance(tensor, Tensor)
    return tensor


def weights_of(box: Rectangle, trained: Tensor, level: str, threshold: float | str) -> Tensor:
    log_ratio = box.padded((trained - box.inputs.behaviour).detach(), padding=0.0)
    tensor, _ = rollout.compute_rollout_correction_weights(log_ratio, box.mask, level, threshold)
    assert isinstance(tensor, Tensor)
    return tensor


@pytest.mark.parametrize("loss", MEANS)
@pytest.mark.parametrize("kind", ["grpo", "dapo", "dr-grpo"])
@pytest.mark.parametrize("proximal", ["behaviour", "recomputed"])
def test_clipped_ratio(kind: str, loss: str, proximal: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of("vanilla", box, logprobs, low=0.2, high=0.28, loss=loss)

    assert (
        difference(PACKAGE, kind, theirs, clip_high=0.28, loss=loss, proximal=proximal) < TOLERANCE
    )


@pytest.mark.parametrize("loss", ["token-mean", "sequence-mean"])
def test_gspo(loss: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of("gspo", box, logprobs, low=0.03, high=0.04, loss=loss)

    assert difference(PACKAGE, "gspo", theirs, clip_low=0.03, clip_high=0.04, loss=loss) < TOLERANCE


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.28), (1.0, 4.0)])
def test_cispo(low: float, high: float) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return loss_of("cispo", box, logprobs, low=low, high=high, loss="token-mean")

    assert difference(PACKAGE, "cispo", theirs, clip_low=low, clip_high=high) < TOLERANCE


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_truncated_importance_sampling(level: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        assert box.inputs.proximal is not None
        weights = weights_of(box, box.inputs.proximal, level, 1.5)
        return loss_of(
            "vanilla", box, logprobs, low=0.2, high=0.28, loss="token-mean", weights=weights
        )

    assert difference(PACKAGE, "tis", theirs, level=level, max_weight=1.5) < TOLERANCE


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_decoupled_ppo_with_its_bound(level: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        assert box.inputs.proximal is not None
        weights = weights_of(box, box.inputs.proximal, level, "0.000000000001_1.5")
        return loss_of(
            "vanilla", box, logprobs, low=0.2, high=0.28, loss="token-mean", weights=weights
        )

    assert difference(PACKAGE, "decoupled-ppo", theirs, level=level, max_weight=1.5) < TOLERANCE


def test_icepop_is_decoupled_ppo_with_a_mask_of_tokens() -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        assert box.inputs.proximal is not None
        weights = weights_of(box, box.inputs.proximal, "token", "0.5_2.0")
        return loss_of(
            "vanilla", box, logprobs, low=0.2, high=0.28, loss="token-mean", weights=weights
        )

    keys: dict[str, Any] = {"mask": "token", "mask_low": 0.5, "mask_high": 2.0, "max_weight": 5.0}
    assert difference(PACKAGE, "decoupled-ppo", theirs, **keys) < TOLERANCE


def test_reinforce_with_a_truncated_ratio_is_cispo_without_a_lower_bound() -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        return _reinforce(box, logprobs, weights_of(box, logprobs, "token", 2.0))

    assert difference(PACKAGE, "cispo", theirs, clip_low=1.0, clip_high=1.0) < TOLERANCE


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("good", "bad"), [(1.0, 1.0), (0.6, 1.7)])
def test_topr_from_parts_of_verl(level: str, good: float, bad: float) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        tapered = bad * weights_of(box, logprobs, level, 1.0)
        positive = (box.scores >= 0)[:, None]
        return _reinforce(box, logprobs, torch.where(positive, good * box.mask, tapered))

    if good == bad == 1.0:
        assert difference(PACKAGE, "topr", theirs, level=level) < TOLERANCE
    keys: dict[str, Any] = {"level": level, "positive_weight": good, "negative_weight": bad}
    assert difference(PACKAGE, "weighted-topr", theirs, **keys) < TOLERANCE


def _reinforce(box: Rectangle, logprobs: Tensor, weights: Tensor) -> Tensor:
    tensor, _ = core.compute_policy_loss_reinforce(
        rollout_log_prob=box.padded(box.inputs.behaviour),
        log_prob=box.padded(logprobs),
        advantages=box.padded(box.inputs.advantages),
        response_mask=box.mask,
        loss_agg_mode="token-mean",
        config=config(0.2, 0.2),
        rollout_is_weights=weights,
    )
    assert isinstance(tensor, Tensor)
    return tensor


@pytest.mark.parametrize("estimate", ["k1", "k2", "k3"])
def test_kl_to_the_reference(estimate: str) -> None:
    def theirs(box: Rectangle, logprobs: Tensor) -> Tensor:
        policy = loss_of("vanilla", box, logprobs, low=0.2, high=0.28, loss="token-mean")
        assert box.inputs.reference is not None
        penalty = core.kl_penalty(box.padded(logprobs), box.padded(box.inputs.reference), estimate)
        tensor = policy + 0.3 * core.agg_loss(penalty, box.mask, "token-mean")
        assert isinstance(tensor, Tensor)
        return tensor

    assert set(ESTIMATES) == {"k1", "k2", "k3"}
    # verl cuts its k3 off at 10 nats per token, which the widest spread reaches.
    assert (
        difference(PACKAGE, "grpo", theirs, spreads=SPREADS[:2], kl_coef=0.3, kl_estimate=estimate)
        < TOLERANCE
    )


@pytest.mark.parametrize(
    ("mask", "option"),
    [("token", "token_k1"), ("sequence", "seq_sum_k1"), ("geometric", "seq_mean_k1")],
)
@pytest.mark.parametrize("spread", SPREADS)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_masks(mask: Any, option: str, spread: float, lengths: tuple[int, ...]) -> None:
    low, high = 0.7, 1.6
    inputs = random_inputs(len(lengths), lengths, spread=spread, proximal=True)
    box = Rectangle(inputs)
    assert inputs.proximal is not None
    log_ratio = box.padded(inputs.proximal - inputs.behaviour, padding=0.0)
    # verl bounds behaviour / trained, the inverse.
    theirs, _ = rollout.compute_rollout_rejection_mask(
        log_ratio, box.mask, option, f"{1 / high!r}_{1 / low!r}"
    )
    ours = box.padded(kept_tokens(inputs, mask, low=low, high=high).double(), padding=0.0)
    note(PACKAGE, f"mask {mask}", {}, float((ours - theirs).abs().max()))
    assert torch.equal(ours, theirs.double())


@pytest.mark.parametrize("rule", ["grpo", "grpo without std", "rloo"])
def test_advantages(rule: str) -> None:
    chance = np.random.default_rng(5)
    sizes = [2, 5, 8, 3]
    groups = [chance.normal(size=size).tolist() for size in sizes]
    flat = [entry for group in groups for entry in group]
    index = np.repeat(np.arange(len(sizes)), sizes)
    rewards = torch.tensor(flat, dtype=torch.float64)[:, None]
    mask = torch.ones_like(rewards)
    if rule == "rloo":
        theirs, _ = core.compute_rloo_outcome_advantage(rewards, mask, index)
        ours = [leave_one_out_advantages(group, divide_by_std=False) for group in groups]
    else:
        by_std = rule == "grpo"
        theirs, _ = core.compute_grpo_outcome_advantage(
            rewards, mask, index, epsilon=1e-4, norm_adv_by_std_in_grpo=by_std
        )
        ours = [group_advantages(group, divide_by_std=by_std) for group in groups]
    results = [entry for group in ours for entry in group]
    worst = max(
        math.fabs(mine - other)
        for mine, other in zip(results, theirs[:, 0].tolist(), strict=True)
        if mine is not None
    )
    note(PACKAGE, f"advantage {rule}", {}, worst)
    assert worst < TOLERANCE
