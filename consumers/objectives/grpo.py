"""Objectives with a clipped ratio to p (`Inputs.around`).

    ratio_t = pi_theta(o_t) / p(o_t)
    J_t     = min(ratio_t A, clip(ratio_t, 1 - low, 1 + high) A)

`registry` adds masks and KL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora_pipe.config.model import Objective
from dora_pipe.consumers.objectives.terms import Inputs, Terms, row_geometric, row_ratios

if TYPE_CHECKING:
    from torch import Tensor


def grpo(inputs: Inputs, keys: Objective) -> Terms:
    """Clip the ratio to the sampling version.

    GRPO (DeepSeekMath, arXiv 2402.03300, equation 3) with the asymmetric clip of DAPO (arXiv
    2503.14476, equation 8) and DORA's behavior policy per trajectory (arXiv 2604.26256, equations 3
    and 4): one version samples a trajectory (C1), so recorded log-probs are pi_w. With loss =
    "constant" and plain advantages: Dr. GRPO (arXiv 2503.20783, equation 3). With other advantages:
    PPO (arXiv 1707.06347, equation 7).
    """
    return _clipped((inputs.logprobs - inputs.around).exp(), inputs.advantages, keys)


def decoupled_ppo(inputs: Inputs, keys: Objective) -> Terms:
    """J_t = (p / w) min(u A, clip(u) A), u = pi_theta / p.

    AReaL (arXiv 2505.24298, section 5.2; after Hilton et al., arXiv 2110.00641). Drops tokens with
    p / w above `max_weight`, as AReaL's `behav_imp_weight_cap`. Without a proximal policy: `grpo`.
    """
    if inputs.proximal is None:
        return grpo(inputs, keys)
    weight = _behaviour_weight(inputs, keys)
    assert keys.max_weight is not None
    kept = weight <= keys.max_weight
    terms = grpo(inputs.without(kept), keys)
    weight = weight.where(kept, weight.new_zeros(()))
    return Terms(
        loss=(terms.loss * weight).where(kept, weight.new_zeros(())),
        ratio=terms.ratio,
        clipped=terms.clipped,
        weight=weight,
        kept=kept,
    )


def tis(inputs: Inputs, keys: Objective) -> Terms:
    """J_t = min(p / w, C) min(u A, clip(u) A), u = pi_theta / p, C = `max_weight`.

    Truncated importance sampling (fengyao.notion.site/off-policy-rl; FlashRL; verl's `rollout_is`).
    level = "sequence": p / w is the trajectory's product. Without a proximal policy: `grpo`.
    """
    terms = grpo(inputs, keys)
    if inputs.proximal is None:
        return terms
    assert keys.max_weight is not None
    weight = _behaviour_weight(inputs, keys).clamp(max=keys.max_weight)
    return Terms(loss=terms.loss * weight, ratio=terms.ratio, clipped=terms.clipped, weight=weight)


def gspo(inputs: Inputs, keys: Objective) -> Terms:
    """Clip s = (product of ratios) ^ (1 / length), one per trajectory, without masked tokens.

    GSPO (arXiv 2507.18071, equations 5 and 7) in per-token form with equal value and gradient
    (equations 13 and 14): s_t = sg(s) pi_theta(o_t) / sg(pi_theta(o_t)).
    """
    log_ratio = inputs.logprobs - inputs.around
    ratio = row_geometric(log_ratio, inputs.lengths, inputs.kept)
    own = (inputs.logprobs - inputs.logprobs.detach()).exp()
    return _clipped(ratio * own, inputs.advantages, keys)


def _clipped(ratio: Tensor, advantages: Tensor, keys: Objective) -> Terms:
    assert keys.clip_low is not None
    assert keys.clip_high is not None
    plain = ratio * advantages
    cut = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high) * advantages
    loss = -plain.minimum(cut)
    return Terms(loss=loss, ratio=ratio.detach(), clipped=(cut < plain).detach())


def _behaviour_weight(inputs: Inputs, keys: Objective) -> Tensor:
    assert inputs.proximal is not None
    log_weight = (inputs.proximal - inputs.behaviour).detach()
    if keys.level == "sequence":
        return row_ratios(log_weight, inputs.lengths)
    return log_weight.exp()
