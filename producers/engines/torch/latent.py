"""Attention over latents for token rows (DeepSeek-V2, arXiv 2405.04434, section 2.1); decides that
the latent alone is kept.

Head h has keys c K_h^T and values c V_h^T of a latent c that all heads have in common. As
q (c K_h^T)^T = (q K_h) c^T, a query is taken into the latent and meets it there; and what is
attended to is added up there, and taken to the head's values behind it. So attention is that of one
key-value head, as wide as the latent and what positions turn, whose values are its keys; a token
costs a cache `rank + turned` numbers, not `heads` times as many.

Both products are batches over heads, of all token rows at once (see rule 2 of `model`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import CausalLM, Latent

NORM_EPS: Final = 1e-6
"""Of the norms of latents, whatever `rms_norm_eps` says, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentWeights:
    """What one layer makes queries, keys and values of latents with; the latents themselves are of
    its fused first product, [queries, latent, turned key]."""

    query_norm: torch.Tensor | None  # [queries]
    queries: torch.Tensor | None  # [heads * (plain + turned), queries]
    norm: torch.Tensor  # [rank]
    up: torch.Tensor  # [heads, plain + value, rank]

    def places(self) -> dict[str, torch.Tensor]:
        """Where the tensors of a file go, by the name within their layer."""
        found = {
            "self_attn.kv_a_layernorm.weight": self.norm,
            "self_attn.kv_b_proj.weight": self.up.flatten(0, 1),
        }
        if self.query_norm is not None and self.queries is not None:
            found["self_attn.q_a_layernorm.weight"] = self.query_norm
            found["self_attn.q_b_proj.weight"] = self.queries
        return found


def empty_latent(model: CausalLM) -> LatentWeights | None:
    """Room for what a layer has of latents."""
    latent, heads = model.latent, model.heads
    if latent is None:
        return None
    some = latent.queries > 0
    queries = (heads * (latent.plain + latent.turned), latent.queries)
    return LatentWeights(
        query_norm=torch.empty(latent.queries) if some else None,
        queries=torch.empty(queries) if some else None,
        norm=torch.empty(latent.rank),
        up=torch.empty(heads, latent.plain + latent.value, latent.rank),
    )


def into_latent(
    model: CausalLM, weights: LatentWeights, made: torch.Tensor, turns: torch.Tensor
) -> torch.Tensor:
    """Queries, and behind them what is kept of each token: [rows, (heads + 1) * head_dim].

    `made` is what the layer's first product gives, `turns` as in `model.forward`.
    """
    latent, heads = _latent(model), model.heads
    sizes = [made.shape[1] - model.head_dim, latent.rank, latent.turned]
    first, low, key = torch.split(made, sizes, 1)
    if weights.queries is not None:
        normed = F.rms_norm(first, (latent.queries,), weights.query_norm, NORM_EPS)
        first = F.linear(normed, weights.queries)
    queries = first.reshape(len(made), heads, latent.plain + latent.turned)
    plain, turned = torch.split(queries, [latent.plain, latent.turned], -1)
    found = torch.empty(len(made), heads + 1, model.head_dim)
    met = torch.bmm(plain.transpose(0, 1), weights.up[:, : latent.plain])
    found[:, :heads, : latent.rank] = met.transpose(0, 1)
    found[:, heads, : latent.rank] = F.rms_norm(low, (latent.rank,), weights.norm, NORM_EPS)
    # Heads and key as one array: by themselves, keys of all rows would be one line of numbers,
    # and the last ones of a line are computed another way.
    pairs = torch.cat([turned, key.unsqueeze(1)], 1)
    torch.view_as_complex(pairs.view(len(made), heads + 1, -1, 2)).mul_(turns)
    found[..., latent.rank :] = pairs
    return found.view(len(made), -1)


def out_of_latent(model: CausalLM, weights: LatentWeights, attended: torch.Tensor) -> torch.Tensor:
    """The heads' values [rows, heads * value] of what they attended to, [rows, heads * rank]."""
    latent, rows = _latent(model), len(attended)
    low = attended.view(rows, model.heads, latent.rank).transpose(0, 1)
    values = torch.bmm(low, weights.up[:, latent.plain :].transpose(1, 2))
    return values.transpose(0, 1).reshape(rows, -1)


def _latent(model: CausalLM) -> Latent:
    assert model.latent is not None
    return model.latent
