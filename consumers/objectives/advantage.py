"""What each sibling of a group is worth, and how much each token weighs; pure numbers, no torch.

Rewards that are not valid are None: such siblings are kept and counted, but they enter neither
their group's mean nor the loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

STD_FLOOR: Final = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""

Averaging = Literal["token-mean", "sequence-mean"]


def group_advantages(rewards: Sequence[float | None], *, divide_by_std: bool) -> list[float | None]:
    """The advantage of every sibling: A_i = r_i - mean(r), divided by std(r) if asked.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without the division: Dr. GRPO (arXiv
    2503.20783, equation 3). The standard deviation is the sample's (n - 1). None stays None; fewer
    than two valid rewards, or all equal ones, give exactly 0: there is nothing to compare with.

    Example: ``group_advantages([1.0, None, 0.0], divide_by_std=False) == [0.5, None, -0.5]``
    """
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or min(valid) == max(valid):
        return [None if reward is None else 0.0 for reward in rewards]
    mean = math.fsum(valid) / len(valid)
    scale = 1.0
    if divide_by_std:
        squares = math.fsum((reward - mean) ** 2 for reward in valid)
        scale = math.sqrt(squares / (len(valid) - 1)) + STD_FLOOR
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def token_weights(sampled: Sequence[int], averaging: Averaging) -> list[float]:
    """The weight of each token of each trajectory in the mean over a minibatch.

    `sampled` are the sampled tokens of its valid trajectories. token-mean: 1 / sum of L (DAPO,
    arXiv 2503.14476, equation 8). sequence-mean: 1 / (n * L_i) (GRPO, and DORA, arXiv 2604.26256,
    equation 4). The weights of all tokens add up to 1; a trajectory without tokens weighs nothing.
    """
    if averaging == "token-mean":
        total = sum(sampled)
        return [1.0 / total if total else 0.0] * len(sampled)
    return [1.0 / (len(sampled) * length) if length else 0.0 for length in sampled]
