"""The clipped policy objective with a behaviour policy per trajectory; pure functions on tensors.

    ratio_t = pi_theta(o_t) / pi_w(o_t)               w = the version that sampled the trajectory
    J_t     = min(ratio_t A, clip(ratio_t, 1 - low, 1 + high) A) - beta KL_t
    KL_t    = r_t - log r_t - 1,  r_t = pi_ref(o_t) / pi_theta(o_t)     (the k3 estimate)

GRPO (DeepSeekMath, arXiv 2402.03300, equations 3 and 4), with the asymmetric clip of DAPO (arXiv
2503.14476, equation 8) and DORA's behaviour policy per trajectory (arXiv 2604.26256, equations 3
and 4): all tokens of a trajectory come from one version (C1), so the log-probs recorded while it
was sampled are pi_w and nothing is recomputed. Nothing here imports torch: tensors bring their
own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One entry per sampled token, all of shape [N]; only `loss` carries a gradient."""

    loss: Tensor
    """-J_t, not yet weighted."""
    ratio: Tensor
    clipped: Tensor
    """Bool: the clip cuts this token's gradient off."""
    kl: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFigures:
    """What one trajectory contributed."""

    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clipped_share: float
    kl: float
    loss_share: float
    """Its part of the minibatch's loss."""


def grpo_terms(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    kl: float = 0.0,
    reference: Tensor | None = None,
) -> Terms:
    """The loss of every token; all tensors [N], float. `reference` is needed when `kl` > 0.

    Example: ``(grpo_terms(...).loss * weights).sum().backward()`` with `token_weights`.
    """
    ratio = (logprobs - behaviour).exp()
    plain = ratio * advantages
    cut = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = -plain.minimum(cut)
    estimate = None
    if kl > 0.0:
        assert reference is not None
        estimate = k3(logprobs, reference)
        loss = loss + kl * estimate
    return Terms(
        loss=loss,
        ratio=ratio.detach(),
        clipped=(cut < plain).detach(),
        kl=None if estimate is None else estimate.detach(),
    )


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The k3 estimate of KL(pi_theta, pi_ref) per token: r - log r - 1, never negative."""
    log_r = reference - logprobs
    return log_r.exp() - log_r - 1.0


def row_figures(terms: Terms, weights: Tensor, lengths: Sequence[int]) -> list[RowFigures]:
    """Figures per trajectory, whose tokens stand one after the other; every length is >= 1."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
    counts = np.asarray(lengths, dtype=np.float64)
    ratio = _numbers(terms.ratio)
    clipped = np.add.reduceat(_numbers(terms.clipped), starts) / counts
    loss = np.add.reduceat(_numbers(terms.loss.detach() * weights), starts)
    kl = np.zeros(len(counts))
    if terms.kl is not None:
        kl = np.add.reduceat(_numbers(terms.kl), starts) / counts
    mean = np.add.reduceat(ratio, starts) / counts
    low, high = np.minimum.reduceat(ratio, starts), np.maximum.reduceat(ratio, starts)
    columns = (column.tolist() for column in (mean, low, high, clipped, kl, loss))
    return [
        RowFigures(
            ratio_mean=mean_,
            ratio_min=low_,
            ratio_max=high_,
            clipped_share=clipped_,
            kl=kl_,
            loss_share=loss_,
        )
        for mean_, low_, high_, clipped_, kl_, loss_ in zip(*columns, strict=True)
    ]


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return tensor.cpu().numpy().astype(np.float64)
