"""Parse config.json into models for the torch engine.

Unsupported settings raise PolicyError, so that no model runs with wrong results.
"""

from __future__ import annotations

import math
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
    sharpened,
)
from dora_pipe.schemas.routes import need_room, number_type
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.model_dir import read_config

LATENT: Final = ("deepseek_v2", "deepseek_v3")
MIXTURES: Final = ("qwen3_moe", "glm4_moe", *LATENT)
SIGMOIDS: Final = ("glm4_moe", "deepseek_v3")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", *MIXTURES)
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Config keys of the number of experts."""
_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "glm4_moe": {"num_nextn_predict_layers": 1, "n_shared_experts": 1, "norm_topk_prob": True},
    "deepseek_v2": {"n_shared_experts": 2, "topk_method": "greedy"},
    "deepseek_v3": {
        "num_nextn_predict_layers": 1,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
        "n_group": 8,
        "topk_group": 4,
    },
}
"""Defaults of missing keys."""
MISTRAL_WINDOW_TOKENS = 4096
QWEN3_HEAD_DIM = 128

CHOICE_BIAS: Final = "mlp.gate.e_score_correction_bias"
"""Bias of expert scores, for the choice only."""

_HINT = "the torch engine takes full-attention models of the families " + ", ".join(FAMILIES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1)."""

    queries: int
    """q_lora_rank, or 0."""
    rank: int
    """kv_lora_rank."""
    plain: int
    """Dimensions per head without rotary position, first."""
    turned: int
    """Rotary dimensions; all heads share this key."""
    value: int
    """Dimensions per value head."""
    paired: bool
    """Rotary pairs are adjacent in files, not halves apart."""
    sharpened: float = 1.0
    """yarn's factor on attention scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedRows:
    """Rotary rows of a tensor: `count` from `start` on in every `width`. In files, row i pairs with
    row `count` / 2 + i."""

    width: int
    start: int
    count: int


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
    """Key-value heads; 1 with latent attention."""
    head_dim: int
    """Dimensions of a cached key; with latent attention `rank + turned`."""
    norm_eps: float
    rope: Rope
    tied: bool
    """Input and output embedding are one matrix, once in files."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    latent: Latent | None = None
    further: range = range(0)
    """Next-token prediction layers in files, ignored."""

    @property
    def turned(self) -> int:
        """Return the rotary dimensions per head: last with latent attention, else first."""
        return self.latent.turned if self.latent else int(self.head_dim * self.rope.share)

    @property
    def turned_rows(self) -> dict[str, TurnedRows]:
        """Return layers and norms to interleave, by name in a decoder layer."""
        latent = self.latent
        if latent is None:
            rows = TurnedRows(width=self.head_dim, start=0, count=self.turned)
            both = ("proj", "norm")
            return {f"self_attn.{which}_{kind}": rows for which in "qk" for kind in both}
        if latent.paired:
            return {}
        queries = TurnedRows(
            width=latent.plain + latent.turned, start=latent.plain, count=latent.turned
        )
        key = TurnedRows(width=self.head_dim, start=latent.rank, count=latent.turned)
        projection = "q_b_proj" if latent.queries else "q_proj"
        return {f"self_attn.{projection}": queries, "self_attn.kv_a_proj_with_mqa": key}

    @property
    def value_dim(self) -> int:
        return self.latent.rank if self.latent else self.head_dim

    @property
    def kept(self) -> int:
        """Return cached vectors per token and key-value head."""
        return 1 if self.latent else 2

    @property
    def attended(self) -> int:
        return self.heads * (self.latent.value if self.latent else self.head_dim)

    @property
    def score_scale(self) -> float:
        if self.latent is None:
            return 1.0 / math.sqrt(self.head_dim)
        return self.latent.sharpened / math.sqrt(self.latent.plain + self.latent.turned)

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
        hidden = self.hidden
        block, width = self.block(layer)
        linears = self._attention_linears() | {
            "self_attn.o_proj": (hidden, self.attended, self.out_bias),
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
        if self.latent is not None:
            ranks = {"kv": self.latent.rank, "q": self.latent.queries}
            shapes |= {
                f"self_attn.{name}_a_layernorm.weight": (n,) for name, n in ranks.items() if n
            }
        return shapes | (self._expert_tensors() if self.sparse(layer) else {})

    def _attention_linears(self) -> dict[str, tuple[int, int, bool]]:
        """Return rows, columns and bias."""
        hidden, bias, latent = self.hidden, self.qkv_bias, self.latent
        if latent is None:
            rows = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
            return {
                f"self_attn.{which}_proj": (heads * self.head_dim, hidden, bias)
                for which, heads in rows.items()
            }
        queries = self.heads * (latent.plain + latent.turned)
        return {
            "self_attn.q_proj": (0 if latent.queries else queries, hidden, False),
            "self_attn.q_a_proj": (latent.queries, hidden, bias),
            "self_attn.q_b_proj": (queries, latent.queries, False),
            "self_attn.kv_a_proj_with_mqa": (latent.rank + latent.turned, hidden, bias),
            "self_attn.kv_b_proj": (self.heads * (latent.plain + latent.value), latent.rank, False),
        }

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
    if family in MIXTURES and (refused := _router_obstacle(config, family)):
        return refused
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


def _router_obstacle(config: Mapping[str, Any], family: str) -> str | None:
    groups = (config.get("n_group") or 1) > 1
    if groups and family == "qwen3_moe":
        return f"experts of type {family!r} that are chosen group by group are not supported"
    if family not in LATENT:
        return None
    scores = "sigmoid" if family in SIGMOIDS else "softmax"
    if config.get("scoring_func", scores) != scores:
        return f"a router that scores by {config['scoring_func']!r} is not supported"
    if (config.get("moe_layer_freq") or 1) != 1:
        return f"experts in every layer number {config['moe_layer_freq']} are not supported"
    if family == "deepseek_v2" and config.get("norm_topk_prob"):
        return "scores that are divided by their sum (norm_topk_prob) are not supported"
    ways = ("greedy", "group_limited_greedy") if family == "deepseek_v2" else ("noaux_tc",)
    if config.get("topk_method", ways[0]) not in ways:
        return f"experts that are chosen by {config['topk_method']!r} are not supported"
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
    bias = says and family in ("llama", "qwen3", "qwen3_moe", *LATENT)
    latent = _latent(config, family)
    model = CausalLM(
        family=family,
        vocabulary=positive(config, "vocab_size", int),
        hidden=hidden,
        intermediate=positive(config, "intermediate_size", int),
        layers=positive(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=1 if latent else _kv_heads(config, family, heads),
        head_dim=latent.rank + latent.turned
        if latent
        else positive(
            config, "head_dim", int, QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads
        ),
        norm_eps=positive(config, "rms_norm_eps", float, 1e-6),
        rope=read_rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2" or (says and family == "glm4_moe"),
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family in ("llama", "deepseek_v2"),
        qk_norm=family in ("qwen3", "qwen3_moe")
        or (family == "glm4_moe" and bool(config.get("use_qk_norm"))),
        experts=_experts(config, family),
        latent=latent,
        further=further_layers(config),
    )
    if model.heads % model.kv_heads or (latent is None and model.head_dim % 2) or model.turned % 2:
        raise PolicyError(
            f"{heads} heads of {model.head_dim} do not share {model.kv_heads} key-value heads"
        )
    return model


def _kv_heads(config: Mapping[str, Any], family: str, heads: int) -> int:
    alone = heads if family in ("llama", *LATENT) else None
    return positive(config, "num_key_value_heads", int, alone)


def _latent(config: Mapping[str, Any], family: str) -> Latent | None:
    if family not in LATENT:
        return None
    heads = positive(config, "num_attention_heads", int)
    if _kv_heads(config, family, heads) != heads:
        raise PolicyError(f"keys and values of a latent are of all {heads} heads")
    return Latent(
        queries=positive(config, "q_lora_rank", int) if config.get("q_lora_rank") else 0,
        rank=positive(config, "kv_lora_rank", int),
        plain=positive(config, "qk_nope_head_dim", int),
        turned=positive(config, "qk_rope_head_dim", int),
        value=positive(config, "v_head_dim", int),
        paired=family == "deepseek_v2" or bool(config.get("rope_interleave", True)),
        sharpened=sharpened(rope_fields(config)),
    )


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
    grouped = not qwen and config.get("topk_method") != "greedy"
    groups, groups_chosen = _groups(config, count, chosen) if grouped else (1, 1)
    layers = range(positive(config, "num_hidden_layers", int))
    return Experts(
        count=count,
        per_token=chosen,
        width=width,
        scores="sigmoid" if family in SIGMOIDS else "softmax",
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
