"""Objectives with a detached ratio as weight: CISPO, TOPR, weighted TOPR.

   J_t = sg(weight_t) A log pi_theta(o_t)

The bound limits a token's weight but never removes its gradient, unlike a clipped ratio. Pure
functions on tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.config.model import Objective
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_ratios

if TYPE_CHECKING:
    from torch import Tensor


def cispo(inputs: Inputs, keys: Objective) -> Terms:
    """weight = clip(pi_theta / p, 1 - low, 1 + high).

    CISPO (MiniMax-M1, arXiv 2506.13585, equations 4 and 5). clip_low = 1 means no lower bound, as
    published. With clip_low = 1 and clip_high near 0 it is the REINFORCE with a ratio truncated to
    [0, 1] that ROLL Flash calls TIS (arXiv 2510.11345).
    """
    assert keys.clip_low is not None
    assert keys.clip_high is not None
    ratio = (inputs.logprobs - inputs.around).detach().exp()
    weight = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high)
    return _weighted(inputs, ratio, weight)


def topr(inputs: Inputs, keys: Objective) -> Terms:
    """weight = 1 where A >= 0, else clip(pi_theta / w, 0, 1).

    TOPR (arXiv 2503.14286, equation 8). The sign of the advantage separates good from bad. The
    ratio is that of the trajectory, as published; level = "token" uses that of each token, as ROLL
    does.
    """
    return _tapered(inputs, keys, 1.0, 1.0)


def weighted_topr(inputs: Inputs, keys: Objective) -> Terms:
    """TOPR with separate weights for good and bad trajectories (ROLL Flash, arXiv 2510.11345)."""
    assert keys.positive_weight is not None
    assert keys.negative_weight is not None
    return _tapered(inputs, keys, keys.positive_weight, keys.negative_weight)


def _tapered(inputs: Inputs, keys: Objective, good_weight: float, bad_weight: float) -> Terms:
    log_ratio = (inputs.logprobs - inputs.behaviour).detach()
    whole = keys.level == "sequence"
    ratio = row_ratios(log_ratio, inputs.lengths) if whole else log_ratio.exp()
    good = inputs.advantages >= 0
    weight = (good_weight * ratio.new_ones(ratio.shape)).where(
        good, bad_weight * ratio.clamp(max=1.0)
    )
    terms = _weighted(inputs, ratio, weight)
    return Terms(loss=terms.loss, ratio=terms.ratio, clipped=~good & (ratio > 1.0))


def _weighted(inputs: Inputs, ratio: Tensor, weight: Tensor) -> Terms:
    loss = -(weight * inputs.advantages) * inputs.logprobs
    return Terms(loss=loss, ratio=ratio, clipped=weight != ratio)
