"""The forward pass of a decoder over token rows.

Rules that make a row's result independent of its batch, bitwise (verified by `probe`):

1. A token row is one token at one position; prefill and decode use the same kernels.
2. Linear layers get all rows of a step, at least `ROWS_MIN`: products of one to three rows round
   differently.
3. Attention is one small product per row and key-value head, with a shape set by position (see
   `kv`).
4. A row's experts are summed in a fixed order (see `experts`).
5. All else works row by row.

Weights are replaced in place. Query, key and value matrices are fused, as are gate and up. Rotary
halves are interleaved in the weights, so that a rotation is one complex product; dimensions without
rotary position are multiplied by 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import TURNED, CausalLM
from dora_pipe.producers.engines.torch.experts import ROWS_MIN, ExpertWeights, empty_experts, mixed
from dora_pipe.producers.engines.torch.rope import Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Fused weights of one decoder layer; linear weights are [out, in]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """Dense or shared block; may have no rows."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    experts: ExpertWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Weights of a model, ready to run."""

    model: CausalLM
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def of_each_kind(self) -> Weights:
        kept = self.model.kinds()
        layers = tuple(self.layers[number] for number in kept)
        return replace(self, model=self.model.only(kept), layers=layers)


class Added(Protocol):
    """Additions to outputs of fused layers; see `lora`."""

    def add(self, number: int, fused: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to outputs `y` of ``qkv``, ``out``, ``gate_up`` or ``down`` in layer `number`."""


class Attention(Protocol):
    def __call__(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Attend with rotated `qkv` [rows, (heads + 2 * kv_heads) * head_dim]; fill `out` [rows,
        heads * head_dim]."""


def fuse(model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> Weights:
    weights = empty(model)
    fill(weights, tensors.items())
    return weights


def empty(model: CausalLM) -> Weights:
    embedding = torch.empty(model.vocabulary, model.hidden)
    return Weights(
        model=model,
        embedding=embedding,
        layers=tuple(_empty_layer(model, layer) for layer in range(model.layers)),
        norm=torch.empty(model.hidden),
        head=embedding if model.tied else torch.empty(model.vocabulary, model.hidden),
    )


def fill(weights: Weights, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors of a checked file, one at a time."""
    model, prefix = weights.model, "model.layers."
    destinations = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    places = [_places(model, layer, number) for number, layer in enumerate(weights.layers)]
    with torch.no_grad():
        for name, tensor in tensors:
            if name in destinations:
                destinations[name].copy_(tensor)
                continue
            number, _, rest = name.removeprefix(prefix).partition(".")
            destination = places[int(number)][rest]
            if rest.rpartition(".")[0] in TURNED:
                _interleave(model, tensor, destination)
            else:
                destination.copy_(tensor)


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    attention: Attention,
    rows_needed: int,
    added: Sequence[Added] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return logits [max(rows_needed, ROWS_MIN), vocabulary] of the first rows, and routed experts,
    int64 [rows, per_token] per sparse layer.

    `tokens` int64 [rows], `turns` complex64 [rows, 1, pairs]; at least ROWS_MIN rows.
    """
    model = weights.model
    assert len(tokens) >= ROWS_MIN
    attended = torch.zeros(len(tokens), model.heads * model.head_dim)
    x, chosen = F.embedding(tokens, weights.embedding), list[torch.Tensor]()
    for number, layer in enumerate(weights.layers):
        normed = _norm(x, layer.attention_norm, model)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        for adapter in added:
            adapter.add(number, "qkv", normed, qkv)
        _turn(model, layer, qkv, turns)
        attention(number, qkv, attended)
        projected = F.linear(attended, layer.out, layer.out_bias)
        for adapter in added:
            adapter.add(number, "out", attended, projected)
        x = projected.add_(x)
        normed = _norm(x, layer.mlp_norm, model)
        if layer.experts is None:
            x = _gated(number, layer, normed, added).add_(x)
            continue
        assert model.experts is not None
        mixture = mixed(model.experts, layer.experts, normed, chosen)
        if len(layer.gate_up):
            mixture.add_(_gated(number, layer, normed, added))
        x = mixture.add_(x)
    last = _norm(x[: max(rows_needed, ROWS_MIN)], weights.norm, model)
    return F.linear(last, weights.head), chosen


def _turn(model: CausalLM, layer: Layer, qkv: torch.Tensor, turns: torch.Tensor) -> None:
    rows, turned = len(qkv), (model.heads + model.kv_heads) * model.head_dim
    qk = qkv[:, :turned].view(rows, model.heads + model.kv_heads, model.head_dim)
    if layer.qk_norm is not None:
        qk.mul_(torch.rsqrt(qk.square().mean(-1, keepdim=True) + model.norm_eps))
        qk.mul_(layer.qk_norm)
    torch.view_as_complex(qk.view(rows, -1, model.head_dim // 2, 2)).mul_(turns)


def _gated(number: int, layer: Layer, normed: torch.Tensor, added: Sequence[Added]) -> torch.Tensor:
    gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
    for adapter in added:
        adapter.add(number, "gate_up", normed, gate_up)
    gate, up = gate_up.chunk(2, -1)
    gated = F.silu(gate).mul_(up)
    narrowed = F.linear(gated, layer.down, layer.down_bias)
    for adapter in added:
        adapter.add(number, "down", gated, narrowed)
    return narrowed


def _norm(x: torch.Tensor, weight: torch.Tensor, model: CausalLM) -> torch.Tensor:
    return F.rms_norm(x, (model.hidden,), weight, model.norm_eps)


def _empty_layer(model: CausalLM, layer: int) -> Layer:
    def bias(there: bool, size: int) -> torch.Tensor | None:
        return torch.zeros(size) if there else None  # zero where a fused part has no bias

    hidden, turned = model.hidden, model.heads + model.kv_heads
    outputs = sum(parts_of_qkv(model).values())
    width = model.block(layer)[1]
    return Layer(
        attention_norm=torch.empty(hidden),
        qkv=torch.empty(outputs, hidden),
        qkv_bias=bias(model.qkv_bias, outputs),
        qk_norm=torch.empty(turned, model.head_dim) if model.qk_norm else None,
        out=torch.empty(hidden, model.heads * model.head_dim),
        out_bias=bias(model.out_bias, hidden),
        mlp_norm=torch.empty(hidden),
        gate_up=torch.empty(2 * width, hidden),
        gate_up_bias=bias(model.mlp_bias, 2 * width),
        down=torch.empty(hidden, width),
        down_bias=bias(model.mlp_bias, hidden),
        experts=empty_experts(model, layer),
    )


def parts_of_qkv(model: CausalLM) -> dict[str, int]:
    """Return name and rows of the fused query, key and value layers."""
    heads = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
    return {f"self_attn.{which}_proj": count * model.head_dim for which, count in heads.items()}


def _places(model: CausalLM, layer: Layer, number: int) -> dict[str, torch.Tensor]:
    tensors = {
        "input_layernorm.weight": layer.attention_norm,
        "post_attention_layernorm.weight": layer.mlp_norm,
    }
    if layer.experts is not None:
        tensors |= layer.experts.places()
    sizes = parts_of_qkv(model)
    block = model.block(number)[0]
    fused = (
        ("weight", layer.qkv, layer.out, layer.gate_up, layer.down),
        ("bias", layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias),
    )
    for kind, qkv, out, gate_up, down in fused:
        if qkv is not None:
            parts = torch.split(qkv, list(sizes.values()))
            tensors |= {f"{name}.{kind}": part for name, part in zip(sizes, parts, strict=True)}
        if gate_up is not None and len(gate_up):
            gate, up = gate_up.chunk(2)
            tensors[f"{block}.gate_proj.{kind}"] = gate
            tensors[f"{block}.up_proj.{kind}"] = up
        for name, matrix in (("self_attn.o_proj", out), (f"{block}.down_proj", down)):
            if matrix is not None:
                tensors[f"{name}.{kind}"] = matrix
    if layer.qk_norm is not None:
        # The file has one norm for all heads.
        q, k = torch.split(layer.qk_norm, [model.heads, model.kv_heads])
        tensors |= {"self_attn.q_norm.weight": q.view(-1), "self_attn.k_norm.weight": k.view(-1)}
    return tensors


def interleaved(model: CausalLM, part: torch.Tensor) -> torch.Tensor:
    """Reorder the rotary rows of each head: 0, half, 1, half + 1, ..."""
    result = torch.empty_like(part)
    _interleave(model, part, result)
    return result


def _interleave(model: CausalLM, part: torch.Tensor, target: torch.Tensor) -> None:
    turned, half = model.turned, model.turned // 2
    rows, to = (tensor.view(-1, model.head_dim, *tensor.shape[1:]) for tensor in (part, target))
    pairs = to[:, :turned].view(len(to), half, 2, *to.shape[2:]).transpose(1, 2)
    pairs.copy_(rows[:, :turned].view(len(rows), 2, half, *rows.shape[2:]))
    to[:, turned:].copy_(rows[:, turned:])


YARN_LEAST: Final = 0.001
"""Minimum width of the blend."""


def rotations(model: CausalLM, context_tokens: int) -> torch.Tensor:
    """Return complex64 [context_tokens, head_dim / 2]."""
    positions = torch.arange(context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(model.rope, model.turned))
    still = (0, (model.head_dim - model.turned) // 2)
    cos, sin = angles.cos() * model.rope.stretch, angles.sin() * model.rope.stretch
    return torch.complex(F.pad(cos, still, value=1.0), F.pad(sin, still))


def _frequencies(rope: Rope, turned: int) -> torch.Tensor:
    """Return radians per position; operations ordered as in transformers."""
    exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "yarn":
        return _yarn(rope, turned)
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # Long waves are stretched, short ones kept, those between blended.
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies


def _yarn(rope: Rope, turned: int) -> torch.Tensor:
    """Return yarn's frequencies (arXiv 2309.00071, section 3.2)."""

    def pair_of(turns: float) -> float:
        return (turned * math.log(rope.original_tokens / (turns * 2 * math.pi))) / (
            2 * math.log(rope.theta)
        )

    low, high = pair_of(rope.fast), pair_of(rope.slow)
    if rope.whole:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, turned - 1)
    waves = rope.theta ** (torch.arange(0, turned, 2, dtype=torch.float32) / turned)
    pairs = torch.arange(turned // 2, dtype=torch.float32)
    kept = 1 - ((pairs - low) / (high - low or YARN_LEAST)).clamp(0, 1)
    return 1.0 / (rope.factor * waves) * (1 - kept) + 1.0 / waves * kept
