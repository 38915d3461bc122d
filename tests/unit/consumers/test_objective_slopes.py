"""The gradient of every objective is that of its value, whatever is combined with it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from dora_pipe.config.objectives import KEYS, Advantage, Level, Mask
from dora_pipe.consumers.learners.settings import StepSettings
from dora_pipe.consumers.objectives.advantage import batch_advantages
from dora_pipe.consumers.objectives.kl import ESTIMATES
from dora_pipe.consumers.objectives.masks import kept_tokens
from dora_pipe.consumers.objectives.table import needs
from dora_pipe.consumers.objectives.terms import Inputs
from tests.support.objectives import KINDS, chosen, gradient, random_inputs, rows, weights_of

WEIGHTED = ("cispo", "topr", "weighted-topr")
EVERY = [
    (kind, mask, advantage, kl, level)
    for kind, mask, advantage in product(KINDS, get_args(Mask), get_args(Advantage))
    for kl in (None, "k1", "k2", "k3")[: 4 if "kl" in KEYS[kind] else 1]
    for level in get_args(Level)[: 2 if "level" in KEYS[kind] else 1]
]


@pytest.mark.parametrize(("kind", "mask", "advantage", "kl", "level"), EVERY)
def test_gradient_is_the_slope_under_every_mask_advantage_and_kl(
    kind: str, mask: str, advantage: Advantage, kl: str | None, level: str
) -> None:
    wanted: dict[str, Any] = {"mask": mask}
    wanted |= {"mask_low": 0.8, "mask_high": 1.3} if mask != "none" else {}
    wanted |= {"level": level} if "level" in KEYS[kind] else {}
    wanted |= {"kl": 0.3, "kl_estimate": kl} if kl and "kl" in KEYS[kind] else {}
    settings = chosen(kind, **wanted)
    lengths = [3, 1, 4, 2]
    inputs = random_inputs(1, lengths, proximal=needs(settings).proximal)
    (worth,) = batch_advantages([(0, [1.0, 0.25, -0.5, 0.0])], advantage, True)
    spread = [one for one, length in zip(worth, lengths, strict=True) for _ in range(length)]
    inputs = replace(inputs, advantages=torch.tensor(spread, dtype=torch.float64))
    kept = torch.ones(10, dtype=torch.bool)
    if mask != "none":
        kept = kept_tokens(inputs, settings.mask, low=0.8, high=1.3)
        assert 0 < kept.sum() < 10
    objective = slope_of(inputs, settings, kept)
    point = inputs.logprobs.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(objective, (point,), eps=1e-7, atol=1e-5)
    torch.autograd.backward(objective(point))
    assert point.grad is not None
    assert torch.allclose(gradient(inputs, settings), point.grad, atol=1e-12)


def slope_of(inputs: Inputs, settings: StepSettings, kept: Tensor) -> Callable[[Tensor], Tensor]:
    """The loss as a function of log-probs alone: what has no gradient is held still."""
    weight = torch.ones_like(inputs.behaviour)
    if inputs.proximal is not None and settings.weight_max is not None:
        log_weight = inputs.proximal - inputs.behaviour
        if settings.level == "sequence":
            sums = [part.sum().expand(len(part)) for part in rows(inputs, log_weight)]
            log_weight = torch.cat(sums)
        weight = log_weight.exp()
        if settings.kind == "decoupled-ppo":
            weight = weight.where(weight <= settings.weight_max, torch.zeros(()).double())
        weight = weight.clamp(max=settings.weight_max)
    held = weights_of(inputs, settings) if settings.kind in WEIGHTED else None

    def ratio_of(log_ratio: Tensor) -> Tensor:
        if settings.kind != "gspo":
            return log_ratio.exp()
        parts = zip(rows(inputs, log_ratio), rows(inputs, kept), strict=True)
        means = [part[of].mean() if of.any() else part.detach().new_zeros(()) for part, of in parts]
        spread = [one.expand(length) for one, length in zip(means, inputs.lengths, strict=True)]
        return torch.cat(spread).exp()

    def objective(logprobs: Tensor) -> Tensor:
        logprobs = logprobs.where(kept, logprobs.detach())
        if held is not None:
            gain = held * inputs.advantages * logprobs
        else:
            ratio = ratio_of(logprobs - inputs.around)
            assert settings.clip_low is not None and settings.clip_high is not None
            cut = ratio.clip(1 - settings.clip_low, 1 + settings.clip_high)
            gain = weight * torch.minimum(ratio * inputs.advantages, cut * inputs.advantages)
        loss = -gain
        if settings.kl:
            assert inputs.reference is not None
            loss = loss + settings.kl * ESTIMATES[settings.kl_estimate](logprobs, inputs.reference)
        return loss.where(kept, torch.zeros(()).double()).sum()

    return objective
