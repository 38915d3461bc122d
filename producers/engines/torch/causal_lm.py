"""Parse config.json into models for the torch engine.

Unsupported settings raise PolicyError, so that no model runs with wrong results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.base import need_positions
from dora_pipe.producers.engines.torch.rope import (
    ROPE_KINDS,
    Rope,
    positive,
    read_rope,
    rope_fields,
)
from dora_pipe.schemas.routes import need_room, number_type
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.model_dir import read_config

MIXTURES: Final = ("qwen3_moe", "glm4_moe")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of the number of experts."""
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4_moe": {"num_nextn_predict_layers": 1, "n_shared_experts": 1, "norm_topk_prob": True}
}
"""Defaults of missing keys."""
MISTRAL_WINDOW_TOKENS = 4096
QWEN3_HEAD_DIM = 128

TURNED: Final = frozenset(
    f"self_attn.{which}_{kind}" for which in "qk" for kind in ("proj", "norm")
)
"""Layers and norms with rotary rows, by name in a decoder layer."""

CHOICE_BIAS: Final = "mlp.gate.e_score_correction_bias"
"""Bias of expert scores, for the choice only."""

_HINT = "the torch engine takes full-attention models of the families " + ", ".join(FAMILIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    count: int
    per_token: int
    width: int
    """Intermediate size of one expert."""
    scores: Literal["softmax", "sigmoid"]
    """Function of the router's logits; with sigmoid, a bias is added for the choice."""
    normed: bool
    """Chosen scores are divided by their sum."""
    layers: tuple[int, ...]
    """Sparse layers."""
    shared_width: int = 0
    """Intermediate size of shared experts; 0 without any."""
    scale: float = 1.0
    groups: int = 1
    """Equal groups of consecutive experts."""
    groups_chosen: int = 1
    """Highest-scoring groups that a token chooses from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """Sizes and switches of a model that the torch engine can run."""

    family: str
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    tied: bool
    """Input and output embedding are one matrix, once in files."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    further: range = range(0)
    """Next-token prediction layers in files, ignored."""

    @property
    def turned(self) -> int:
        """Return the rotary dimensions per head, the first ones."""
        return int(self.head_dim * self.rope.share)

    def sparse(self, layer: int) -> bool:
        return self.experts is not None and layer in self.experts.layers

    def block(self, layer: int) -> tuple[str, int]:
        """Return name and width of the dense or shared block; width 0 without one."""
        if self.experts is None or not self.sparse(layer):
            return "mlp", self.intermediate
        return "mlp.shared_experts", self.experts.shared_width

    def kinds(self) -> list[int]:
        """Return the first layer of each kind (dense, sparse)."""
        first = {self.sparse(layer): layer for layer in reversed(range(self.layers))}
        return sorted(first.values())

    def only(self, layers: Sequence[int]) -> CausalLM:
        kept = tuple(index for index, layer in enumerate(layers) if self.sparse(layer))
        experts = None if self.experts is None else replace(self.experts, layers=kept)
        return replace(self, layers=len(layers), experts=experts)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor in the files."""
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocabulary, self.hidden),
            "model.norm.weight": (self.hidden,),
        }
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        for layer in range(self.layers):
            for name, shape in self._layer_tensors(layer).items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    def _layer_tensors(self, layer: int) -> dict[str, tuple[int, ...]]:
        hidden, queries = self.hidden, self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        block, width = self.block(layer)
        linears = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.out_bias),
            f"{block}.gate_proj": (width, hidden, self.mlp_bias),
            f"{block}.up_proj": (width, hidden, self.mlp_bias),
            f"{block}.down_proj": (hidden, width, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (rows, columns, bias) in linears.items():
            if not rows or not columns:
                continue
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {f"self_attn.{which}_norm.weight": (self.head_dim,) for which in "qk"}
        return shapes | (self._expert_tensors() if self.sparse(layer) else {})

    def _expert_tensors(self) -> dict[str, tuple[int, ...]]:
        assert self.experts is not None
        count, width = self.experts.count, self.experts.width
        shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (count, self.hidden)}
        if self.experts.scores == "sigmoid":
            shapes[CHOICE_BIAS] = (count,)
        for number in range(count):
            for which in ("gate", "up"):
                shapes[f"mlp.experts.{number}.{which}_proj.weight"] = (width, self.hidden)
            shapes[f"mlp.experts.{number}.down_proj.weight"] = (self.hidden, width)
        return shapes


def need_experts(model: CausalLM, where: Path, *, context_tokens: int) -> None:
    """Raise PolicyError without experts, ConfigError if a record cannot hold those of a context."""
    experts = model.experts
    if experts is None or not experts.layers:
        raise PolicyError(
            f"sampling.return_routed_experts: {where} is not a mixture of experts",
            hint="remove the key",
        )
    entry = len(experts.layers) * experts.per_token * number_type(experts.count).itemsize
    need_room(context_tokens, entry)


def read_causal_lm(model_dir: Path, *, context_tokens: int) -> CausalLM:
    """Read the model of a directory. Raises PolicyError for an unsupported setting."""
    config = read_config(model_dir)
    try:
        family = _family(config)
        config = dict(_DEFAULTS.get(family, {})) | dict(config)
        obstacle = _obstacle(config, family, context_tokens)
        if obstacle:
            raise PolicyError(obstacle)
        model = _causal_lm(config, family)
    except PolicyError as error:
        where = model_dir / "config.json"
        raise PolicyError(f"{where}: {error.message}", hint=_HINT) from None
    need_positions(model_dir, context_tokens)
    return model


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise PolicyError(f"models of type {family!r} are not supported")
    return str(family)


def _obstacle(config: Mapping[str, Any], family: str, context_tokens: int) -> str | None:
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if config.get("quantization_config"):
        return "quantized weights are not supported"
    if family not in MIXTURES and any("expert" in key and value for key, value in config.items()):
        return f"mixtures of experts of type {family!r} are not supported"
    if family == "qwen3_moe" and (config.get("n_group") or 1) > 1:
        return f"experts of type {family!r} that are chosen group by group are not supported"
    if config.get("hidden_act", "silu") != "silu":
        return f"the activation {config['hidden_act']!r} is not supported"
    window = window_of(config, family)
    if window is not None and window < context_tokens:
        return f"sliding-window attention over {window} tokens is not supported"
    kind = rope_fields(config).get("rope_type", "default")
    if kind not in ROPE_KINDS:
        return f"rotary positions of type {kind!r} are not supported"
    if family != "glm4_moe" and rope_fields(config).get("partial_rotary_factor", 1.0) != 1.0:
        return "rotary positions over a part of the head are not supported"
    return None


def window_of(config: Mapping[str, Any], family: str) -> int | None:
    """Return the smallest attention window, None for full attention."""
    kinds = set(config.get("layer_types") or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return 0
    if family == "mistral":
        window = config.get("sliding_window", MISTRAL_WINDOW_TOKENS)
    elif "sliding_attention" in kinds or (not kinds and config.get("use_sliding_window")):
        window = config.get("sliding_window")
    else:
        window = None
    return window if isinstance(window, int) else None


def _causal_lm(config: Mapping[str, Any], family: str) -> CausalLM:
    heads = positive(config, "num_attention_heads", int)
    hidden = positive(config, "hidden_size", int)
    says = bool(config.get("attention_bias", False))
    bias = says and family in ("llama", "qwen3", "qwen3_moe")
    model = CausalLM(
        family=family,
        vocabulary=positive(config, "vocab_size", int),
        hidden=hidden,
        intermediate=positive(config, "intermediate_size", int),
        layers=positive(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=positive(config, "num_key_value_heads", int, heads if family == "llama" else None),
        head_dim=positive(
            config, "head_dim", int, QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads
        ),
        norm_eps=positive(config, "rms_norm_eps", float, 1e-6),
        rope=read_rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2" or (says and family == "glm4_moe"),
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe")
        or (family == "glm4_moe" and bool(config.get("use_qk_norm"))),
        experts=_experts(config, family),
        further=further_layers(config),
    )
    if model.heads % model.kv_heads or model.head_dim % 2 or model.turned % 2:
        raise PolicyError(
            f"{heads} heads of {model.head_dim} do not share {model.kv_heads} key-value heads"
        )
    return model


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    every = int(config.get("decoder_sparse_step") or 1)
    return layer >= int(config.get("first_k_dense_replace") or 0) and (layer + 1) % every == 0


def _experts(config: Mapping[str, Any], family: str) -> Experts | None:
    if family not in MIXTURES:
        return None
    qwen, width = family == "qwen3_moe", positive(config, "moe_intermediate_size", int)
    count = positive(config, next((key for key in EXPERTS if config.get(key)), EXPERTS[0]), int)
    chosen = positive(config, "num_experts_per_tok", int)
    if chosen > count:
        raise PolicyError(f"{chosen} experts per token of {count}")
    groups, groups_chosen = (1, 1) if qwen else _groups(config, count, chosen)
    layers = range(positive(config, "num_hidden_layers", int))
    return Experts(
        count=count,
        per_token=chosen,
        width=width,
        scores="softmax" if qwen else "sigmoid",
        normed=bool(config.get("norm_topk_prob")),
        layers=tuple(layer for layer in layers if is_sparse(config, layer)),
        shared_width=0 if qwen else width * int(config.get("n_shared_experts") or 0),
        scale=1.0 if qwen else positive(config, "routed_scaling_factor", float, 1.0),
        groups=groups,
        groups_chosen=groups_chosen,
    )


def _groups(config: Mapping[str, Any], count: int, per_token: int) -> tuple[int, int]:
    groups, chosen = positive(config, "n_group", int, 1), positive(config, "topk_group", int, 1)
    size = count // groups
    if groups > 1 and (count % groups or size < 2 or chosen > groups or chosen * size < per_token):
        raise PolicyError(
            f"{count} experts in {groups} groups (n_group), of which a token's {per_token} are from"
            f" {chosen} (topk_group): invalid"
        )
    return (groups, chosen) if groups > 1 else (1, 1)
