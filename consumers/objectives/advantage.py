"""Advantages of trajectories and weights of tokens, without torch.

Trajectories with an invalid reward (None) enter neither baseline nor loss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from dora_pipe.config.objectives import Advantage, Averaging
from dora_pipe.core.errors import NonFinite

STD_FLOOR: Final = 1e-4
"""Added to std to bound advantages of nearly equal rewards."""

FLOAT32_MAX: Final = 3.4e38
"""Bound of advantages, to fit a float32."""

Rewards = Sequence[float | None]


def group_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """Return A_i = r_i - mean(r), optionally divided by std(r).

    GRPO (DeepSeekMath, arXiv 2402.03300, section 4.1.2); undivided: Dr. GRPO (arXiv 2503.20783,
    equation 3). std is the sample's (n - 1). Fewer than two valid rewards, or equal ones, give
    exactly 0; None stays None.
    """
    mean, scale = _mean_and_scale(rewards, divide_by_std=divide_by_std)
    if scale is None:
        return [None if reward is None else 0.0 for reward in rewards]
    return [None if reward is None else (reward - mean) / scale for reward in rewards]


def leave_one_out_advantages(rewards: Rewards, *, divide_by_std: bool) -> list[float | None]:
    """Return A_i = r_i - mean of the other r, optionally divided by std(r).

    RLOO (Kool et al. 2019; Ahmadian et al., arXiv 2402.14740): equals n / (n - 1) (r_i - mean(r))
    and adds no bias.
    """
    count = sum(reward is not None for reward in rewards)
    plain = group_advantages(rewards, divide_by_std=divide_by_std)
    factor = count / (count - 1) if count > 1 else 1.0
    return [None if value is None else factor * value for value in plain]


def version_advantages(
    groups: Sequence[tuple[int, Rewards]], *, divide_by_std: bool
) -> list[list[float | None]]:
    """Return A_i = r_i - mu_k; mu_k is the mean valid reward of version k in the batch.

    Version-specific baseline of DORA (arXiv 2604.26256 v2), over all prompts, so groups with equal
    rewards get an advantage too. `groups` are (version, rewards).
    """
    pools: dict[int, list[float | None]] = {}
    for version, rewards in groups:
        pools.setdefault(version, []).extend(rewards)
    by_rule: Mapping[int, list[float | None]] = {
        version: group_advantages(pool, divide_by_std=divide_by_std)
        for version, pool in pools.items()
    }
    streams = {version: iter(advantages) for version, advantages in by_rule.items()}
    return [[next(streams[version]) for _ in rewards] for version, rewards in groups]


def batch_advantages(
    groups: Sequence[tuple[int, Rewards]], advantage: Advantage | None, divide_by_std: bool
) -> list[list[float | None]]:
    """Return the batch's advantages by group, by `objective.advantage`; 0 without a rule.

    `groups` are (version, rewards). Raises NonFinite if one overflows float32, impossible for
    rewards within `REWARD_MAX`.
    """
    try:
        advantages = _by_rule(groups, advantage, divide_by_std)
    except OverflowError:
        advantages = [[math.inf]]
    if not all(value is None or abs(value) <= FLOAT32_MAX for row in advantages for value in row):
        largest = max(abs(value) for _, row in groups for value in row if value is not None)
        raise NonFinite(f"advantages overflow: the batch has a reward of size {largest:g}")
    return advantages


def _by_rule(
    groups: Sequence[tuple[int, Rewards]], advantage: Advantage | None, divide_by_std: bool
) -> list[list[float | None]]:
    if advantage is None:
        return [[None if reward is None else 0.0 for reward in rewards] for _, rewards in groups]
    if advantage == "version-baseline":
        return version_advantages(groups, divide_by_std=divide_by_std)
    rule = group_advantages if advantage == "group" else leave_one_out_advantages
    return [rule(rewards, divide_by_std=divide_by_std) for _, rewards in groups]


def token_weights(
    sampled: Sequence[int], averaging: Averaging, *, tokens: int | None = None
) -> list[float]:
    """Return a token's weight in the minibatch mean, by trajectory; 0 without tokens.

    `sampled` are the token counts L_i of its n valid trajectories.

    token-mean: 1 / sum of L (DAPO, arXiv 2503.14476, equation 8), adding up to 1.
    sequence-mean: 1 / (n * L_i) (GRPO, and DORA, arXiv 2604.26256, equation 4), adding up to 1.
    constant: 1 / (n * `tokens`) (Dr. GRPO, arXiv 2503.20783, section 3.2).
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
    """Return `token_weights` times the mean's divisor, and that divisor; both add up over parts."""
    if averaging == "token-mean":
        return [1.0] * len(sampled), sum(sampled)
    if averaging == "constant":
        assert tokens is not None
        return [1.0 / tokens if length else 0.0 for length in sampled], len(sampled)
    return [1.0 / length if length else 0.0 for length in sampled], len(sampled)


def _mean_and_scale(rewards: Rewards, *, divide_by_std: bool) -> tuple[float, float | None]:
    valid = [reward for reward in rewards if reward is not None]
    if len(valid) < 2 or min(valid) == max(valid):
        return 0.0, None
    mean = math.fsum(valid) / len(valid)
    if not divide_by_std:
        return mean, 1.0
    squares = math.fsum((reward - mean) ** 2 for reward in valid)
    return mean, math.sqrt(squares / (len(valid) - 1)) + STD_FLOOR
