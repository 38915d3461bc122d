"""The forward pass of a decoder over token rows; decides the shape of every matrix product.

Rules that make the bits of a row independent of its company (measured, and measured again when an
engine opens, see `probe`):

1. A token row is one token at one position. A prompt is fed as such rows, by the same kernels as
   a sampled token, so prefill and decode cannot differ.
2. The linear layers get all token rows of a step at once, never fewer than `ROWS_MIN`: a matrix
   product with one to three rows takes another path and rounds differently.
3. Attention is a batch of small products, one for each row and key-value head, whose shape depends
   on the position of the row alone (see `kv`).
4. Experts get the rows that chose them, and a row's results are added up in an order of its own
   (see `experts`).
5. Everything else works on each row by itself.

Weights are replaced in place, tensor by tensor: an engine never has two of them.

Theory of operation: query, key and value matrices are fused into one, gate and up into another.
The halves that rotary positions turn into each other are interleaved in the weights, so that the
rotation is one product of complex numbers; a permutation common to queries and keys does not
change attention. Where positions turn a part of each head only, the rest is multiplied by 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from dora_pipe.producers.engines.torch.causal_lm import CausalLM, Rope
from dora_pipe.producers.engines.torch.experts import (
    ROWS_MIN,
    ExpertWeights,
    empty_experts,
    mixed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The fused weights of one decoder layer; linear weights are [out, in]."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """Of the block that every token passes; without rows where there is none."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    experts: ExpertWeights | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model that can be run."""

    model: CausalLM
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    norm: torch.Tensor
    head: torch.Tensor

    def of_each_kind(self) -> Weights:
        """The same with the first layer of each kind only: equal shapes, less work."""
        kept = self.model.kinds()
        layers = tuple(self.layers[number] for number in kept)
        return replace(self, model=self.model.only(kept), layers=layers)


class Added(Protocol):
    """What some rows get beside the model's own weights; see `lora`."""

    def add(self, number: int, fused: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add to the outputs `y` that layer `number` made of `x` by one of its fused matrices:
        ``qkv``, ``out``, ``gate_up`` or ``down``."""


class Attention(Protocol):
    """The attention of one step: writes keys and values, then reads them."""

    def __call__(self, layer: int, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Attend with `qkv` [rows, (heads + 2 kv_heads) * head_dim], rotated; fill `out`."""


def fuse(model: CausalLM, tensors: Mapping[str, torch.Tensor]) -> Weights:
    """Weights from the tensors of a checked file (names of Hugging Face)."""
    weights = empty(model)
    fill(weights, tensors.items())
    return weights


def empty(model: CausalLM) -> Weights:
    """Weights of a model, with room for every number and nothing in it."""
    embedding = torch.empty(model.vocabulary, model.hidden)
    return Weights(
        model=model,
        embedding=embedding,
        layers=tuple(_empty_layer(model, layer) for layer in range(model.layers)),
        norm=torch.empty(model.hidden),
        head=embedding if model.tied else torch.empty(model.vocabulary, model.hidden),
    )


def fill(weights: Weights, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Copy the tensors of a checked file into weights, one after the other, whatever type their
    numbers have."""
    model, prefix = weights.model, "model.layers."
    whole = {
        "model.embed_tokens.weight": weights.embedding,
        "model.norm.weight": weights.norm,
        "lm_head.weight": weights.head,
    }
    places = [_places(model, layer, number) for number, layer in enumerate(weights.layers)]
    with torch.no_grad():
        for name, tensor in tensors:
            if name in whole:
                whole[name].copy_(tensor)
                continue
            number, _, rest = name.removeprefix(prefix).partition(".")
            place, turned = places[int(number)][rest]
            if turned:
                _interleave(tensor, place, model)
            else:
                place.copy_(tensor)


def rotations(model: CausalLM, context_tokens: int) -> torch.Tensor:
    """The rotation of each position and frequency: complex64 [context_tokens, head_dim / 2]."""
    positions = torch.arange(context_tokens, dtype=torch.float32)
    angles = torch.outer(positions, _frequencies(model.rope, model.turned))
    angles = F.pad(angles, (0, (model.head_dim - model.turned) // 2))
    return torch.complex(angles.cos(), angles.sin())


def forward(
    weights: Weights,
    tokens: torch.Tensor,
    turns: torch.Tensor,
    attention: Attention,
    wanted: int,
    added: Sequence[Added] = (),
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [max(wanted, ROWS_MIN), vocabulary] of the first token rows.

    `tokens` int64 [rows], `turns` complex64 [rows, 1, head_dim / 2] (rows of `rotations`); there
    are at least ROWS_MIN rows. `added` changes what it says of some of them. Beside the logits:
    through which experts each row went, int64 [rows, per_token] for each layer that has some.
    """
    model = weights.model
    rows, turned = len(tokens), (model.heads + model.kv_heads) * model.head_dim
    assert rows >= ROWS_MIN
    attended = torch.zeros(rows, model.heads * model.head_dim)
    x, chosen = F.embedding(tokens, weights.embedding), list[torch.Tensor]()
    for number, layer in enumerate(weights.layers):
        normed = _norm(x, layer.attention_norm, model)
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias)
        for one in added:
            one.add(number, "qkv", normed, qkv)
        qk = qkv[:, :turned].view(rows, model.heads + model.kv_heads, model.head_dim)
        if layer.qk_norm is not None:
            qk.mul_(torch.rsqrt(qk.square().mean(-1, keepdim=True) + model.norm_eps))
            qk.mul_(layer.qk_norm)
        torch.view_as_complex(qk.view(rows, -1, model.head_dim // 2, 2)).mul_(turns)
        attention(number, qkv, attended)
        projected = F.linear(attended, layer.out, layer.out_bias)
        for one in added:
            one.add(number, "out", attended, projected)
        x = projected.add_(x)
        normed = _norm(x, layer.mlp_norm, model)
        if layer.experts is None:
            x = _gated(number, layer, normed, added).add_(x)
            continue
        assert model.experts is not None
        made = mixed(model.experts, layer.experts, normed, chosen)
        if len(layer.gate_up):
            made.add_(_gated(number, layer, normed, added))
        x = made.add_(x)
    last = _norm(x[: max(wanted, ROWS_MIN)], weights.norm, model)
    return F.linear(last, weights.head), chosen


def _gated(number: int, layer: Layer, normed: torch.Tensor, added: Sequence[Added]) -> torch.Tensor:
    """What the block that every token passes makes of rows."""
    gate_up = F.linear(normed, layer.gate_up, layer.gate_up_bias)
    for one in added:
        one.add(number, "gate_up", normed, gate_up)
    gate, up = gate_up.chunk(2, -1)
    gated = F.silu(gate).mul_(up)
    narrowed = F.linear(gated, layer.down, layer.down_bias)
    for one in added:
        one.add(number, "down", gated, narrowed)
    return narrowed


def _norm(x: torch.Tensor, weight: torch.Tensor, model: CausalLM) -> torch.Tensor:
    return F.rms_norm(x, (model.hidden,), weight, model.norm_eps)


def _empty_layer(model: CausalLM, layer: int) -> Layer:
    def bias(there: bool, size: int) -> torch.Tensor | None:
        return torch.empty(size) if there else None

    hidden, turned = model.hidden, model.heads + model.kv_heads
    outputs = (turned + model.kv_heads) * model.head_dim
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


Place = tuple[torch.Tensor, bool]
"""Where a tensor of a file goes, and whether the rows of each head are interleaved there."""


def _places(model: CausalLM, layer: Layer, number: int) -> dict[str, Place]:
    """By the name within its layer."""
    found: dict[str, Place] = {
        "input_layernorm.weight": (layer.attention_norm, False),
        "post_attention_layernorm.weight": (layer.mlp_norm, False),
    }
    if layer.experts is not None:
        found |= {name: (one, False) for name, one in layer.experts.places().items()}
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    block = model.block(number)[0]
    fused = (
        ("weight", layer.qkv, layer.out, layer.gate_up, layer.down),
        ("bias", layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias),
    )
    for kind, qkv, out, gate_up, down in fused:
        if qkv is not None:
            q, k, v = torch.split(qkv, [queries, keys, keys])
            for which, part, turned in (("q", q, True), ("k", k, True), ("v", v, False)):
                found[f"self_attn.{which}_proj.{kind}"] = part, turned
        if gate_up is not None and len(gate_up):
            gate, up = gate_up.chunk(2)
            found[f"{block}.gate_proj.{kind}"] = gate, False
            found[f"{block}.up_proj.{kind}"] = up, False
        for name, whole in (("self_attn.o_proj", out), (f"{block}.down_proj", down)):
            if whole is not None:
                found[f"{name}.{kind}"] = whole, False
    if layer.qk_norm is not None:
        # One norm of a head's size in the file, which every head has here.
        q, k = torch.split(layer.qk_norm.view(-1), [queries, keys])
        found |= {"self_attn.q_norm.weight": (q, True), "self_attn.k_norm.weight": (k, True)}
    return found


def interleaved(part: torch.Tensor, model: CausalLM) -> torch.Tensor:
    """Rows of each head reordered 0, half, 1, half + 1, ...: pairs that are turned together."""
    found = torch.empty_like(part)
    _interleave(part, found, model)
    return found


def _interleave(part: torch.Tensor, place: torch.Tensor, model: CausalLM) -> None:
    """Copy rows to where they are turned, those of one head to all; the others lie as they did."""
    turned, half = model.turned, model.turned // 2
    rows, to = (one.view(-1, model.head_dim, *one.shape[1:]) for one in (part, place))
    pairs = to[:, :turned].view(len(to), half, 2, *to.shape[2:]).transpose(1, 2)
    pairs.copy_(rows[:, :turned].view(len(rows), 2, half, *rows.shape[2:]))
    to[:, turned:].copy_(rows[:, turned:])


def _frequencies(rope: Rope, turned: int) -> torch.Tensor:
    """Radians per position of each pair; float32 arithmetic in the order of transformers."""
    exponents = torch.arange(0, turned, 2, dtype=torch.float32) / turned
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    smooth = (rope.original_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    # Long waves are stretched, short ones kept, those between blended.
    smooth = smooth.clamp(0, 1)
    return (1 - smooth) * frequencies / rope.factor + smooth * frequencies
