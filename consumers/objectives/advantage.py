"""What each trajectory of a batch is worth, and how much each token weighs; pure numbers, no torch.

Rewards that are not valid are None: such siblings are kept and counted, but they enter neither
what the others are compared with nor the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dora_pipe.config.objectives import Advantage, Averaging
from dora_pipe.core.errors import NonFinite

STD_FLOOR: Final = 1e-4
"""Added to the standard deviation, so that nearly equal rewards do not blow up."""

FLOAT32_MAX: Final = 3.4e38
"""What advantages are turned into ends there."""

Rewards = Sequence[float | None]


def group_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """The advantage of every sibling: A_i = r_i - mean(r), divided by std(r) if asked.

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without the division: Dr. GRPO (arXiv
    2503.20783, equation 3). The standard deviation is the sample's (n - 1). None stays None; fewer
    than two valid rewards, or all equal ones, give exactly 0: there is nothing to compare with.

    Example: ``group_advantages([1.0, None, 0.0], divide_by_std=False) == [0.5, None, -0.5]``
    """
    mean, scale = _mean_and_scale(rewards, divide_by_std=divide_by_std)
    if scale is None:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """A_i = r_i - mean of the siblings' r, that is n / (n - 1) (r_i - mean(r)).

    RLOO (Kool and others 2019; Ahmadian and others, arXiv 2402.14740): the baseline
    does not depend on the trajectory's own reward, so it adds no bias. Divided by std(r) if asked.

    Example: ``leave_one_out_advantages([1.0, 0.0, 0.0], divide_by_std=False) == [1.0, -0.5, -0.5]``
    """
    count = sum(reward is not None for reward in rewards)
    plain = group_advantages(rewards, divide_by_std=divide_by_std)
    factor = count / (count - 1) if count > 1 else 1.0
    return [None if one is None else factor * one for one in plain]


def version_advantages(
    groups: Sequence[tuple[int, Rewards]], *, divide_by_std: bool
) -> list[list[float | None]]:
    """A_i = r_i - mu_k: mu_k is the mean of all valid rewards in the batch that version k earned.

    The version-specific baseline of DORA (arXiv 2604.26256 v2): a batch is a mixture of versions,
    and each version is its own baseline. A group is of one version here, so its mean is that of
    its version for its prompt already; mu_k is taken over all prompts of the version, which also
    gives groups an advantage whose siblings all earned the same. `groups` are (version, rewards).
    """
    pools: dict[int, list[float | None]] = {}
    for version, rewards in groups:
        pools.setdefault(version, []).extend(rewards)
    found: Mapping[int, list[float | None]] = {
        version: group_advantages(pool, divide_by_std=divide_by_std)
        for version, pool in pools.items()
    }
    streams = {version: iter(advantages) for version, advantages in found.items()}
    return [[next(streams[version]) for _ in rewards] for version, rewards in groups]


def batch_advantages(
    groups: Sequence[tuple[int, Rewards]], advantage: Advantage | None, divide_by_std: bool
) -> list[list[float | None]]:
    """The advantages of a whole batch, group by group, by the rule `objective.advantage`; 0 where
    rewards make none, and there is no rule.

    `groups` are (version, rewards of the siblings), in the order of the batch. Raises NonFinite
    where an advantage is no finite float32; rewards within `REWARD_MAX` give none such.
    """
    try:
        found = _by_rule(groups, advantage, divide_by_std)
    except OverflowError:
        found = [[math.inf]]
    if not all(one is None or abs(one) <= FLOAT32_MAX for row in found for one in row):
        largest = max(abs(one) for _, row in groups for one in row if one is not None)
        raise NonFinite(f"advantages overflow: the batch has a reward of size {largest:g}")
    return found


def _by_rule(
    groups: Sequence[tuple[int, Rewards]], advantage: Advantage | None, divide_by_std: bool
) -> list[list[float | None]]:
    if advantage is None:
        return [[None if one is None else 0.0 for one in rewards] for _, rewards in groups]
    if advantage == "version-baseline":
        return version_advantages(groups, divide_by_std=divide_by_std)
    rule = group_advantages if advantage == "group" else leave_one_out_advantages
    return [rule(rewards, divide_by_std=divide_by_std) for _, rewards in groups]


def token_weights(
    sampled: Sequence[int], averaging: Averaging, *, tokens: int | None = None
) -> list[float]:
    """The weight of each token of each trajectory in the mean over a minibatch.

    `sampled` are the sampled tokens of its valid trajectories. token-mean: 1 / sum of L (DAPO,
    arXiv 2503.14476, equation 8). sequence-mean: 1 / (n * L_i) (GRPO, and DORA, arXiv 2604.26256,
    equation 4); both add up to 1 over all tokens. constant: 1 / (n * `tokens`) (Dr. GRPO, arXiv
    2503.20783, section 3.2: no trajectory is favoured for its length). A trajectory without tokens
    weighs nothing.
    """
    if averaging == "token-mean":
        total = sum(sampled)
        return [1.0 / total if total else 0.0] * len(sampled)
    if averaging == "constant":
        assert tokens is not None
        return [1.0 / (len(sampled) * tokens) if length else 0.0 for length in sampled]
    return [1.0 / (len(sampled) * length) if length else 0.0 for length in sampled]


def summed_weights(
    sampled: Sequence[int], averaging: Averaging, *, tokens: int | None = None
) -> tuple[list[float], int]:
    """Weights as of `token_weights` times what that mean divides by, and that divisor.

    Of parts of a minibatch: sums with these weights and divisors add up, and the one divided by the
    other is the mean over all of it.
    """
    if averaging == "token-mean":
        return [1.0] * len(sampled), sum(sampled)
    if averaging == "constant":
        assert tokens is not None
        return [1.0 / tokens if length else 0.0 for length in sampled], len(sampled)
    return [1.0 / length if length else 0.0 for length in sampled], len(sampled)


def _mean_and_scale(rewards: Rewards, *, divide_by_std: bool) -> tuple[float, float | None]:
    """Mean and divisor of the valid rewards; no divisor where there is nothing to compare."""
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or min(valid) == max(valid):
        return 0.0, None
    mean = math.fsum(valid) / len(valid)
    if not divide_by_std:
        return mean, 1.0
    squares = math.fsum((reward - mean) ** 2 for reward in valid)
    return mean, math.sqrt(squares / (len(valid) - 1)) + STD_FLOOR
