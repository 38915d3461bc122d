"""The experts of one layer.

An expert computes its rows as one product, at least `ROWS_MIN`. A row's results are added in its
router's order, independent of other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import CHOICE_BIAS, CausalLM, Experts

ROWS_MIN: Final = 8
"""Rows of the smallest product; padded."""

NOTHING: Final = 1e-20
"""Term added to a sum of sigmoids, as in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertWeights:
    """Linear weights are [out, in]."""

    router: torch.Tensor  # [experts, hidden]
    choice_bias: torch.Tensor | None  # [experts]
    gate_up: torch.Tensor  # [experts, 2 * width, hidden]
    down: torch.Tensor  # [experts, hidden, width]

    def places(self) -> dict[str, torch.Tensor]:
        tensors = {"mlp.gate.weight": self.router}
        if self.choice_bias is not None:
            tensors[CHOICE_BIAS] = self.choice_bias
        for number, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            gate, up = gate_up.chunk(2)
            tensors[f"mlp.experts.{number}.gate_proj.weight"] = gate
            tensors[f"mlp.experts.{number}.up_proj.weight"] = up
            tensors[f"mlp.experts.{number}.down_proj.weight"] = down
        return tensors


def empty_experts(model: CausalLM, layer: int) -> ExpertWeights | None:
    experts = model.experts
    if experts is None or not model.sparse(layer):
        return None
    count, width, hidden = experts.count, experts.width, model.hidden
    return ExpertWeights(
        router=torch.empty(count, hidden),
        choice_bias=torch.empty(count) if experts.scores == "sigmoid" else None,
        gate_up=torch.empty(count, 2 * width, hidden),
        down=torch.empty(count, hidden, width),
    )


def routed(
    experts: Experts, weights: ExpertWeights, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of `x` [rows, hidden], int64 [rows, per_token], and their float32 weights;
    at least ROWS_MIN rows."""
    logits = F.linear(x, weights.router)
    scores = torch.softmax(logits, -1) if experts.scores == "softmax" else _sigmoid(logits)
    ranked = scores if weights.choice_bias is None else scores + weights.choice_bias
    choice = torch.topk(_within_groups(experts, ranked), experts.per_token, -1).indices
    chosen = scores.gather(1, choice)
    if experts.normed:
        total = chosen.sum(-1, keepdim=True)
        chosen = chosen / (total if experts.scores == "softmax" else total + NOTHING)
    return choice, chosen if experts.scale == 1 else chosen * experts.scale


def _within_groups(experts: Experts, ranked: torch.Tensor) -> torch.Tensor:
    """Mask scores [rows, experts] outside the chosen groups, by a group's best two experts
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2)."""
    if experts.groups == 1:
        return ranked
    grouped = ranked.view(len(ranked), experts.groups, -1)
    best = torch.topk(grouped, 2, -1).values
    worth = best[..., 0] + best[..., 1]
    chosen = torch.topk(worth, experts.groups_chosen, -1).indices
    excluded = torch.full_like(ranked[:, : experts.groups], -torch.inf).scatter_(1, chosen, 0)
    return (grouped + excluded.unsqueeze(-1)).view_as(ranked)


def _sigmoid(logits: torch.Tensor) -> torch.Tensor:
    """Return the sigmoid. torch.sigmoid rounds an array's last numbers differently, and the row
    count decides which those are."""
    pairs = torch.stack([logits, torch.zeros_like(logits)], -1)
    return torch.softmax(pairs, -1)[..., 0]


def mixed(
    experts: Experts, weights: ExpertWeights, x: torch.Tensor, chosen: list[torch.Tensor]
) -> torch.Tensor:
    """Return the output for `x` [rows, hidden]; append the experts, int64 [rows, per_token], to
    `chosen`."""
    choice, counts = routed(experts, weights, x)
    chosen.append(choice)
    flat, shares = choice.reshape(-1), counts.reshape(-1, 1)
    parts = torch.empty(len(flat), x.shape[1])
    for number in sorted(set(flat.tolist())):
        places = torch.nonzero(flat == number)[:, 0]
        missing = max(0, ROWS_MIN - len(places))
        padded = torch.cat([places, places[-1:].expand(missing)]) if missing else places
        gate, up = F.linear(x[padded // experts.per_token], weights.gate_up[number]).chunk(2, -1)
        output = F.linear(F.silu(gate).mul_(up), weights.down[number])
        parts[places] = output[: len(places)] * shares[places]
    laid = parts.view(*choice.shape, -1)
    out = laid[:, 0].clone()
    for rank in range(1, experts.per_token):
        out += laid[:, rank]
    return out
