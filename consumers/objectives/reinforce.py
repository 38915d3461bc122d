"""Objectives with a detached ratio as weight.

    J_t = sg(weight_t) A log pi_theta(o_t)

The bound limits a token's weight but, unlike clipping, keeps its gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.config.model import Objective
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_ratios

if TYPE_CHECKING:
    from torch import Tensor


def cispo(inputs: Inputs, keys: Objective) -> Terms:
    """weight = clip(pi_theta / p, 1 - low, 1 + high).

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5); clip_low = 1 is no lower bound, as
    published. With clip_high near 0 also the TIS of ROLL Flash (arXiv 2510.11345).
    """
    assert keys.clip_low is not None
    assert keys.clip_high is not None
    ratio = (inputs.logprobs - inputs.around).detach().exp()
    weight = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high)
    return _weighted(inputs, ratio, weight)


def topr(inputs: Inputs, keys: Objective) -> Terms:
    """weight = 1 where A >= 0, else clip(pi_theta / w, 0, 1).

    TOPR (arXiv 2503.14286, equation 8). The ratio is the trajectory's, as published; level =
    "token" uses each token's, as ROLL does.
    """
    return _tapered(inputs, keys, 1.0, 1.0)


def weighted_topr(inputs: Inputs, keys: Objective) -> Terms:
    """TOPR with weights for good and bad trajectories (ROLL Flash, arXiv 2510.11345)."""
    assert keys.positive_weight is not None
    assert keys.negative_weight is not None
    return _tapered(inputs, keys, keys.positive_weight, keys.negative_weight)


def _tapered(inputs: Inputs, keys: Objective, good_weight: float, bad_weight: float) -> Terms:
    log_ratio = (inputs.logprobs - inputs.behaviour).detach()
    by_sequence = keys.level == "sequence"
    ratio = row_ratios(log_ratio, inputs.lengths) if by_sequence else log_ratio.exp()
    good = inputs.advantages >= 0
    weight = (good_weight * ratio.new_ones(ratio.shape)).where(
        good, bad_weight * ratio.clamp(max=1.0)
    )
    terms = _weighted(inputs, ratio, weight)
    return Terms(loss=terms.loss, ratio=terms.ratio, clipped=~good & (ratio > 1.0))


def _weighted(inputs: Inputs, ratio: Tensor, weight: Tensor) -> Terms:
    loss = -(weight * inputs.advantages) * inputs.logprobs
    return Terms(loss=loss, ratio=ratio, clipped=weight != ratio)
