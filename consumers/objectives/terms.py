"""Inputs and outputs of objectives, and metrics per trajectory; imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

LOG_MAX: Final = 80.0
"""Bound of summed log ratios: `exp` overflows float32 beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Inputs per sampled token, shape [N], contiguous per trajectory and context."""

    logprobs: Tensor
    """Trained policy (theta); the only field with a gradient."""
    behaviour: Tensor
    """Sampling version, as recorded (w)."""
    advantages: Tensor
    lengths: Sequence[int]
    """Tokens per trajectory (or context, if `per_token`), >= 1; sum N."""
    proximal: Tensor | None = None
    """First weights of the step, computed by the trainer (p)."""
    reference: Tensor | None = None
    """Required by a KL term."""
    teacher: Tensor | None = None
    """Required by `objective.teacher_weight`."""
    kept: Tensor | None = None
    """False for masked tokens."""

    @property
    def around(self) -> Tensor:
        """Return the denominator of ratios: proximal if present, else behavior."""
        return self.behaviour if self.proximal is None else self.proximal

    def without(self, kept: Tensor) -> Inputs:
        """Return a copy without gradient for unkept tokens; zero loss times infinite ratios is
        NaN."""
        kept = kept if self.kept is None else kept & self.kept
        logprobs = self.logprobs.where(kept, self.logprobs.detach())
        return replace(self, logprobs=logprobs, kept=kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Results per sampled token, shape [N]; only `loss` has a gradient."""

    loss: Tensor
    """-J_t, before `token_weights`."""
    ratio: Tensor
    clipped: Tensor
    """Bool: the bound changed this token's gradient."""
    kl: Tensor | None = None
    weight: Tensor | None = None
    """proximal / behavior as multiplied in."""
    kept: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMetrics:
    """Metrics of one trajectory; `loss_share` is its part of the minibatch loss."""

    ratio_mean: float
    ratio_min: float
    ratio_max: float
    clipped_share: float
    kl: float
    loss_share: float
    weight_mean: float | None = None
    masked_share: float | None = None


def joined_metrics(parts: Sequence[tuple[RowMetrics, int]]) -> RowMetrics:
    """Combine metrics of parts, given with token counts."""
    total = sum(tokens for _, tokens in parts)

    def mean(name: str) -> float:
        return sum(float(getattr(part, name)) * tokens for part, tokens in parts) / total

    first = parts[0][0]
    return RowMetrics(
        ratio_mean=mean("ratio_mean"),
        ratio_min=min(part.ratio_min for part, _ in parts),
        ratio_max=max(part.ratio_max for part, _ in parts),
        clipped_share=mean("clipped_share"),
        kl=mean("kl"),
        loss_share=sum(part.loss_share for part, _ in parts),
        weight_mean=None if first.weight_mean is None else mean("weight_mean"),
        masked_share=None if first.masked_share is None else mean("masked_share"),
    )


def row_sums(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return trajectory sums per token, [N], in double precision.

    `index_add` is deterministic on a CPU and, in deterministic mode, on a GPU.
    """
    rows = values.new_tensor(np.repeat(np.arange(len(lengths)), lengths).tolist()).long()
    sums = values.double().new_zeros(len(lengths)).index_add(0, rows, values.double())
    return sums.index_select(0, rows)


def row_ratios(log_ratio: Tensor, lengths: Sequence[int]) -> Tensor:
    """Return trajectory products of ratios per token, [N]; detached and finite."""
    total = row_sums(log_ratio.detach(), lengths).clamp(-LOG_MAX, LOG_MAX)
    return total.exp().to(log_ratio.dtype)


def row_geometric(log_ratio: Tensor, lengths: Sequence[int], kept: Tensor | None = None) -> Tensor:
    """Return geometric means of trajectory ratios per token, [N]; detached and finite.

    With `kept`, over kept tokens; 1 without any.
    """
    log_ratio = log_ratio.detach()
    if kept is None:
        counts = log_ratio.double().new_tensor(np.repeat(lengths, lengths).tolist())
    else:
        log_ratio = log_ratio.where(kept, log_ratio.new_zeros(()))
        counts = row_sums(kept.double(), lengths).clamp(min=1.0)
    mean = row_sums(log_ratio, lengths) / counts
    return mean.clamp(-LOG_MAX, LOG_MAX).exp().to(log_ratio.dtype)


def row_metrics(terms: Terms, weights: Tensor, lengths: Sequence[int]) -> list[RowMetrics]:
    """Return metrics per trajectory of contiguous tokens; every length is >= 1."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.intp)
    counts = np.asarray(lengths, dtype=np.float64)
    ratio = _numbers(terms.ratio)

    def mean_of(values: Tensor) -> list[float]:
        means: list[float] = (np.add.reduceat(_numbers(values), starts) / counts).tolist()
        return means

    columns: dict[str, list[float]] = {
        "ratio_mean": mean_of(terms.ratio),
        "ratio_min": np.minimum.reduceat(ratio, starts).tolist(),
        "ratio_max": np.maximum.reduceat(ratio, starts).tolist(),
        "clipped_share": mean_of(terms.clipped),
        "kl": [0.0] * len(counts) if terms.kl is None else mean_of(terms.kl),
        "loss_share": np.add.reduceat(_numbers(terms.loss.detach() * weights), starts).tolist(),
    }
    if terms.weight is not None:
        columns["weight_mean"] = mean_of(terms.weight)
    if terms.kept is not None:
        columns["masked_share"] = mean_of(~terms.kept)
    rows = zip(*columns.values(), strict=True)
    return [RowMetrics(**dict(zip(columns, row, strict=True))) for row in rows]


def _numbers(tensor: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return tensor.cpu().numpy().astype(np.float64)
