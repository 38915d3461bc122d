"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) over cached latents.

Head h has keys c K_h^T and values c V_h^T of a shared latent c. As q (c K_h^T)^T = (q K_h) c^T,
queries are projected into the latent, and attended latents to values. So there is one key-value
head, whose values are its keys; a token caches `rank + turned` numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import CausalLM, Latent

NORM_EPS: Final = 1e-6
"""Epsilon of latent norms as in transformers; not `rms_norm_eps`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """Projections of one layer; the fused product yields [queries, latent, rotary key]."""

    query_norm: torch.Tensor | None  # [queries]
    queries: torch.Tensor | None  # [heads * (plain + turned), queries]
    norm: torch.Tensor  # [rank]
    up: torch.Tensor  # [heads, plain + value, rank]

    def places(self) -> dict[str, torch.Tensor]:
        tensors = {
            "self_attn.kv_a_layernorm.weight": self.norm,
            "self_attn.kv_b_proj.weight": self.up.flatten(0, 1),
        }
        if self.query_norm is not None and self.queries is not None:
            tensors["self_attn.q_a_layernorm.weight"] = self.query_norm
            tensors["self_attn.q_b_proj.weight"] = self.queries
        return tensors


def empty_latent(model: CausalLM) -> LatentWeights | None:
    latent, heads = model.latent, model.heads
    if latent is None:
        return None
    has_queries = latent.queries > 0
    queries = (heads * (latent.plain + latent.turned), latent.queries)
    return LatentWeights(
        query_norm=torch.empty(latent.queries) if has_queries else None,
        queries=torch.empty(queries) if has_queries else None,
        norm=torch.empty(latent.rank),
        up=torch.empty(heads, latent.plain + latent.value, latent.rank),
    )


def into_latent(
    model: CausalLM, weights: LatentWeights, tensor: torch.Tensor, turns: torch.Tensor
) -> torch.Tensor:
    """Return queries and the cached vector: [rows, (heads + 1) * head_dim]. `made` is the first
    product's output."""
    latent, heads = _latent(model), model.heads
    sizes = [tensor.shape[1] - model.head_dim, latent.rank, latent.turned]
    first, low, key = torch.split(tensor, sizes, 1)
    if weights.queries is not None:
        normed = F.rms_norm(first, (latent.queries,), weights.query_norm, NORM_EPS)
        first = F.linear(normed, weights.queries)
    queries = first.reshape(len(tensor), heads, latent.plain + latent.turned)
    plain, turned = torch.split(queries, [latent.plain, latent.turned], -1)
    output = torch.empty(len(tensor), heads + 1, model.head_dim)
    met = torch.bmm(plain.transpose(0, 1), weights.up[:, : latent.plain])
    output[:, :heads, : latent.rank] = met.transpose(0, 1)
    output[:, heads, : latent.rank] = F.rms_norm(low, (latent.rank,), weights.norm, NORM_EPS)
    # One array: separate keys would form one line, whose last numbers are computed differently.
    pairs = torch.cat([turned, key.unsqueeze(1)], 1)
    torch.view_as_complex(pairs.view(len(tensor), heads + 1, -1, 2)).mul_(turns)
    output[..., latent.rank :] = pairs
    return output.view(len(tensor), -1)


def out_of_latent(model: CausalLM, weights: LatentWeights, attended: torch.Tensor) -> torch.Tensor:
    """Project [rows, heads * rank] to [rows, heads * value]."""
    latent, rows = _latent(model), len(attended)
    low = attended.view(rows, model.heads, latent.rank).transpose(0, 1)
    values = torch.bmm(low, weights.up[:, latent.plain :].transpose(1, 2))
    return values.transpose(0, 1).reshape(rows, -1)


def _latent(model: CausalLM) -> Latent:
    assert model.latent is not None
    return model.latent
