"""What goes into an objective and what comes out of it, and figures per trajectory.

Nothing here imports torch: tensors bring their own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LOG_MAX: Final = 80.0
"""Sums of log ratios are cut off here before `exp`: beyond it float32 is infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """One entry per sampled token, shape [N]; those of a trajectory stand side by side, context
    after context."""

    logprobs: Tensor
    """Of the policy that is trained (theta); the only one that carries a gradient."""
    behaviour: Tensor
    """Of the version that sampled, as its engine recorded them (w)."""
    advantages: Tensor
    lengths: Sequence[int]
    """Tokens of each trajectory, of all its contexts, >= 1; they add up to N. (Of each context,
    where the objective says `per_token`.)"""
    proximal: Tensor | None = None
    """Of the step's first weights, as the trainer computed them (p)."""
    reference: Tensor | None = None
    """Of version 0; needed for a KL term."""
    teacher: Tensor | None = None
    """Of the teacher; needed for `objective.teacher_weight`, which makes advantages of it before an
    objective has them."""
    kept: Tensor | None = None
    """Bool: False where a mask leaves the token out; None where there is no mask."""

    @property
    def around(self) -> Tensor:
        """The policy that ratios are taken to: proximal where there is one, else behaviour."""
        return self.behaviour if self.proximal is None else self.proximal

    def without(self, kept: Tensor) -> Inputs:
        """The same, but no gradient flows back to tokens that are not kept.

        Their ratios may be infinite: a loss of 0 alone would leave them a gradient of 0 times that.
        """
        kept = kept if self.kept is None else kept & self.kept
        logprobs = self.logprobs.where(kept, self.logprobs.detach())
        return replace(self, logprobs=logprobs, kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """One entry per sampled token, all of shape [N]; only `loss` carries a gradient."""

    loss: Tensor
    """-J_t, not yet weighted by `token_weights`."""
    ratio: Tensor
    """What the objective bounds."""
    clipped: Tensor
    """Bool: the bound changed this token's gradient."""
    kl: Tensor | None = None
    weight: Tensor | None = None
    """proximal / behaviour as it was multiplied in; None where nothing was."""
    kept: Tensor | None = None
    """Bool: False where a mask left the token out; None where nothing was."""


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
    weight_mean: float | None = None
    """Mean of proximal / behaviour as multiplied in; None where nothing was."""
    masked_share: float | None = None
    """Share of its tokens that a mask left out; None where there is no mask."""


def joined_figures(parts: Sequence[tuple[RowFigures, int]]) -> RowFigures:
    """Figures of a trajectory from those of parts of it, each with its tokens."""
    total = sum(tokens for _, tokens in parts)

    def mean(name: str) -> float:
        return sum(float(getattr(one, name)) * tokens for one, tokens in parts) / total

    first = parts[0][0]
    return RowFigures(
        ratio_mean=mean("ratio_mean"),
        ratio_min=min(one.ratio_min for one, _ in parts),
        ratio_max=max(one.ratio_max for one, _ in parts),
        clipped_share=mean("clipped_share"),
        kl=mean("kl"),
        loss_share=sum(one.loss_share for one, _ in parts),
        weight_mean=None if first.weight_mean is None else mean("weight_mean"),
        masked_share=None if first.masked_share is None else mean("masked_share"),
    )


def row_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Per token, the sum over its trajectory, [N]; summed in double precision.

    By `index_add`, which is deterministic on a CPU and, in deterministic mode, on a GPU.
    """
    rows = values.new_tensor(np.repeat(np.arange(len(lengths)), lengths).tolist()).long()
    sums = values.double().new_zeros(len(lengths)).index_add(0, rows, values.double())
    return sums.index_select(0, rows)


def row_ratios(log_ratio: Tensor, lengths: Sequence[int]) -> Tensor:
    """Per token, the product of its trajectory's ratios, [N]; detached, below infinity."""
    total = row_sums(log_ratio.detach(), lengths).clamp(-LOG_MAX, LOG_MAX)
    return total.exp().to(log_ratio.dtype)


def row_geometric(log_ratio: Tensor, lengths: Sequence[int], kept: Tensor | None = None) -> Tensor:
    """Per token, the geometric mean of its trajectory's ratios, [N]; detached, below infinity.

    With `kept` it is that of the tokens that are kept, and 1 where none of a trajectory's is.
    """
    log_ratio = log_ratio.detach()
    if kept is None:
        counts = log_ratio.double().new_tensor(np.repeat(lengths, lengths).tolist())
    else:
        log_ratio = log_ratio.where(kept, log_ratio.new_zeros(()))
        counts = row_sums(kept.double(), lengths).clamp(min=1.0)
    mean = row_sums(log_ratio, lengths) / counts
    return mean.clamp(-LOG_MAX, LOG_MAX).exp().to(log_ratio.dtype)


def row_figures(terms: Terms, weights: Tensor, lengths: Sequence[int]) -> list[RowFigures]:
    """Figures per trajectory, whose tokens stand one after the other; every length is >= 1."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
    counts = np.asarray(lengths, dtype=np.float64)
    ratio = _numbers(terms.ratio)

    def mean_of(values: Tensor) -> list[float]:
        found: list[float] = (np.add.reduceat(_numbers(values), starts) / counts).tolist()
        return found

    nothing: list[None] = [None] * len(counts)
    columns = (
        mean_of(terms.ratio),
        np.minimum.reduceat(ratio, starts).tolist(),
        np.maximum.reduceat(ratio, starts).tolist(),
        mean_of(terms.clipped),
        [0.0] * len(counts) if terms.kl is None else mean_of(terms.kl),
        np.add.reduceat(_numbers(terms.loss.detach() * weights), starts).tolist(),
        nothing if terms.weight is None else mean_of(terms.weight),
        nothing if terms.kept is None else mean_of(~terms.kept),
    )
    return [
        RowFigures(
            ratio_mean=mean,
            ratio_min=low,
            ratio_max=high,
            clipped_share=clipped,
            kl=kl,
            loss_share=loss,
            weight_mean=weight,
            masked_share=masked,
        )
        for mean, low, high, clipped, kl, loss, weight, masked in zip(*columns, strict=True)
    ]


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return tensor.cpu().numpy().astype(np.float64)
