"""Estimates of KL(pi_theta, pi_ref) per token; pure functions on tensors.

Schulman, "Approximating KL divergence" (joschu.net/blog/kl-approx.html), with
log_r = log pi_ref - log pi_theta. Over tokens of pi_theta the mean of k1 and k3 is KL, that of k2
nearly. Their gradients differ: that of k1 has the mean 0 (it only adds noise), that of k2 the mean
of KL's own, that of k3 the mean of the gradient of KL(pi_ref, pi_theta).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import Tensor


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """-log_r: may be negative."""
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log_r ^ 2 / 2: never negative."""
    return 0.5 * (logprobs - reference).square()


def k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """r - log_r - 1: never negative; the one of GRPO (arXiv 2402.03300, equation 4)."""
    log_r = reference - logprobs
    return log_r.exp() - log_r - 1.0


ESTIMATES: Final[Mapping[str, Callable[[Tensor, Tensor], Tensor]]] = MappingProxyType(
    {"k1": k1, "k2": k2, "k3": k3}
)
