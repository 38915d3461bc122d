"""Advantages of trajectories and weights of tokens, in plain numbers without torch.

Invalid rewards are None: such trajectories enter neither the baseline nor the loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dora_pipe.config.objectives import Advantage, Averaging
from dora_pipe.core.errors import NonFinite

STD_FLOOR: Final = 1e-4
"""Added to the standard deviation to bound advantages of nearly equal rewards."""

FLOAT32_MAX: Final = 3.4e38
"""Largest advantage that fits in a float32."""

Rewards = Sequence[float | None]


def group_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """Return the group-relative advantages: A_i = r_i - mean(r), optionally divided by std(r).

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); without the division: Dr. GRPO (arXiv
    2503.20783, equation 3). std is the sample's (n - 1). None stays None; fewer than two valid
    rewards, or all equal ones, give exactly 0.

    Example: ``group_advantages([1.0, None, 0.0], divide_by_std=False) == [0.5, None, -0.5]``
    """
    mean, scale = _mean_and_scale(rewards, divide_by_std=divide_by_std)
    if scale is None:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """Return A_i = r_i - mean of the other r = n / (n - 1) (r_i - mean(r)), optionally divided by
    std(r).

    RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740): the baseline excludes the
    trajectory's own reward and so adds no bias.

    Example: ``leave_one_out_advantages([1.0, 0.0, 0.0], divide_by_std=False) == [1.0, -0.5, -0.5]``
    """
    count = sum(reward is not None for reward in rewards)
    plain = group_advantages(rewards, divide_by_std=divide_by_std)
    factor = count / (count - 1) if count > 1 else 1.0
    return [None if one is None else factor * one for one in plain]


def version_advantages(
    groups: Sequence[tuple[int, Rewards]], *, divide_by_std: bool
) -> list[list[float | None]]:
    """Return A_i = r_i - mu_k, with mu_k the mean of all valid rewards of version k in the batch.

    Version-specific baseline of DORA (arXiv 2604.26256 v2). mu_k spans all prompts of the version,
    so groups with equal rewards also get an advantage. `groups` are (version, rewards).
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
    """Return the advantages of a batch, group by group, by `objective.advantage`; 0 without a rule.

    `groups` are (version, rewards), in batch order. Raises NonFinite if an advantage is not a
    finite float32, which rewards within `REWARD_MAX` cannot cause.
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
    """Return the weight of a token of each trajectory in the mean over a minibatch.

    `sampled` are the sampled tokens L_i of its n valid trajectories.

    token-mean: 1 / sum of L (DAPO, arXiv 2503.14476, equation 8).
    sequence-mean: 1 / (n * L_i) (GRPO, and DORA, arXiv 2604.26256, equation 4).
    constant: 1 / (n * `tokens`) (Dr. GRPO, arXiv 2503.20783, section 3.2).

    The first two add up to 1 over all tokens. A trajectory without tokens has weight 0.
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
    """Return `token_weights` times the divisor of the mean, and that divisor.

    Sums with these weights and divisors add up over parts of a minibatch; their quotient is its
    mean.
    """
    if averaging == "token-mean":
        return [1.0] * len(sampled), sum(sampled)
    if averaging == "constant":
        assert tokens is not None
        return [1.0 / tokens if length else 0.0 for length in sampled], len(sampled)
    return [1.0 / length if length else 0.0 for length in sampled], len(sampled)


def _mean_and_scale(rewards: Rewards, *, divide_by_std: bool) -> tuple[float, float | None]:
    """Return mean and divisor of the valid rewards; divisor None if there is nothing to compare."""
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or min(valid) == max(valid):
        return 0.0, None
    mean = math.fsum(valid) / len(valid)
    if not divide_by_std:
        return mean, 1.0
    squares = math.fsum((reward - mean) ** 2 for reward in valid)
    return mean, math.sqrt(squares / (len(valid) - 1)) + STD_FLOOR
