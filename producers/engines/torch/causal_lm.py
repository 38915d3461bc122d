"""Decides which Hugging Face causal language models the torch engine takes, from config.json alone.

Taken are decoders with full attention, rotary positions, RMS norms before each block and gated
SiLU blocks, or mixtures of such: the families in `FAMILIES`. Whatever a config says beyond that is
refused in one line, because a model that runs but computes something else would be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from dora_pipe.core.errors import PolicyError
from dora_pipe.schemas.routes import need_room, number_type
from dora_pipe.store.carried_tensors import further_layers
from dora_pipe.store.model_dir import read_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys that say how many experts a layer has, by family and time."""
GLM_TURNED: Final = 0.5
"""What a glm4_moe config without `partial_rotary_factor` means."""
_DEFAULTS: Final = {"glm4_moe": {"num_nextn_predict_layers": 1}}
"""What configs without a key mean, by family."""
ROPE_KINDS = ("default", "linear", "llama3")
"""Rotary frequencies that do not depend on the length of the sequence."""
MISTRAL_WINDOW_TOKENS = 4096
"""What a mistral config without the key means."""
QWEN3_HEAD_DIM = 128
"""What a qwen3 config without the key means."""

CHOICE_BIAS: Final = "mlp.gate.e_score_correction_bias"
"""What is added to an expert's score when experts are chosen, and not when they are weighed."""

_HINT = "the torch engine takes full-attention models of the families " + ", ".join(FAMILIES)
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions; the fields after `theta` belong to linear and llama3 scaling, but for the
    last."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 0
    share: float = 1.0
    """Of each head's numbers, the first ones, that are turned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Blocks of which each token passes a few, by a router's choice."""

    count: int
    per_token: int
    width: int
    """Of one of them."""
    scores: Literal["softmax", "sigmoid"]
    """Of the router's logits; sigmoids are chosen among with a bias added to each."""
    normed: bool
    """Whether the chosen ones' scores are divided by their sum."""
    layers: tuple[int, ...]
    """Those that have experts; the others are dense."""
    shared_width: int = 0
    """Of the block beside them that every token passes; 0: none."""
    scale: float = 1.0
    """What experts give counts so many times."""
    groups: int = 1
    """Of experts that lie beside each other, all of one size."""
    groups_chosen: int = 1
    """By the sum of their two highest scores; a token's experts are from these alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CausalLM:
    """The sizes and switches of a model that the torch engine can run."""

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
    """The output matrix is the embedding; weights files hold it once."""
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    experts: Experts | None = None
    further: range = range(0)
    """Layers behind the last, which files have and nothing here computes."""

    @property
    def turned(self) -> int:
        """Numbers of each head that rotary positions turn, the first ones."""
        return int(self.head_dim * self.rope.share)

    def sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        return self.experts is not None and layer in self.experts.layers

    def block(self, layer: int) -> tuple[str, int]:
        """Name and width of the gated block that every token passes in a layer; 0: none."""
        if self.experts is None or not self.sparse(layer):
            return "mlp", self.intermediate
        return "mlp.shared_experts", self.experts.shared_width

    def kinds(self) -> list[int]:
        """The first layer of each kind that there is."""
        first = {self.sparse(layer): layer for layer in reversed(range(self.layers))}
        return sorted(first.values())

    def only(self, layers: Sequence[int]) -> CausalLM:
        """The same model with these layers alone."""
        kept = tuple(place for place, layer in enumerate(layers) if self.sparse(layer))
        experts = None if self.experts is None else replace(self.experts, layers=kept)
        return replace(self, layers=len(layers), experts=experts)

    @property
    def group(self) -> int:
        """Query heads that share one key-value head."""
        return self.heads // self.kv_heads

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor a weights file of this model has."""
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
        """Of the router and of each expert of a layer."""
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
    """Raise PolicyError for a model that is no mixture, ConfigError for contexts whose experts no
    record can name."""
    experts = model.experts
    if experts is None or not experts.layers:
        raise PolicyError(
            f"sampling.routes: {where} is no mixture of experts", hint="leave the key out"
        )
    entry = len(experts.layers) * experts.per_token * number_type(experts.count).itemsize
    need_room(context_tokens, entry)


def read_causal_lm(model_dir: Path, *, context_tokens: int) -> CausalLM:
    """The model of a directory, to be run with sequences of up to `context_tokens`.

    Raises PolicyError, one line with what is in the way.
    """
    config = read_config(model_dir)
    try:
        family = _family(config)
        _refuse_obstacles(config, family, context_tokens)
        return _causal_lm(config, family)
    except PolicyError as error:
        where = model_dir / "config.json"
        raise PolicyError(f"{where}: {error.message}", hint=_HINT) from None


def _family(config: Mapping[str, Any]) -> str:
    family = config.get("model_type")
    if family not in FAMILIES:
        raise PolicyError(f"models of type {family!r} are not supported")
    return str(family)


def _refuse_obstacles(config: Mapping[str, Any], family: str, context_tokens: int) -> None:
    obstacle = _obstacle(config, family, context_tokens)
    if obstacle:
        raise PolicyError(obstacle)


def _obstacle(config: Mapping[str, Any], family: str, context_tokens: int) -> str | None:
    """What in the config the engine cannot do, or None."""
    if config.get("is_encoder_decoder"):
        return "encoder-decoder models are not supported"
    if config.get("quantization_config"):
        return "quantized weights are not supported"
    mixture = family in ("qwen3_moe", "glm4_moe")
    if not mixture and any("expert" in key and value for key, value in config.items()):
        return f"mixtures of experts of type {family!r} are not supported"
    if family != "glm4_moe" and (config.get("n_group") or 1) > 1:
        return f"experts of type {family!r} that are chosen group by group are not supported"
    if config.get("hidden_act", "silu") != "silu":
        return f"the activation {config['hidden_act']!r} is not supported"
    window = _window(config, family)
    if window is not None and window < context_tokens:
        return f"sliding-window attention over {window} tokens is not supported"
    kind = _rope_fields(config).get("rope_type", "default")
    if kind not in ROPE_KINDS:
        return f"rotary positions of type {kind!r} are not supported"
    if family != "glm4_moe" and _rope_fields(config).get("partial_rotary_factor", 1.0) != 1.0:
        return "rotary positions over a part of the head are not supported"
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and longest < context_tokens:
        return f"its {longest} positions are fewer than a context of {context_tokens} tokens"
    return None


def _window(config: Mapping[str, Any], family: str) -> int | None:
    """Tokens of the smallest attention window, or None where attention is full."""
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


def _rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings, from the present form of a config or the one before it."""
    fields = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    fields.setdefault("rope_type", fields.get("type", "default"))
    fields.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    turned = GLM_TURNED if config.get("model_type") == "glm4_moe" else 1.0
    fields.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or turned)
    return fields


def _number(config: Mapping[str, Any], key: str, kind: type[N], default: N | None = None) -> N:
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int | kind) or value <= 0:
        raise PolicyError(f"{key} is missing or is no positive number")
    return kind(value)


def _causal_lm(config: Mapping[str, Any], family: str) -> CausalLM:
    heads = _number(config, "num_attention_heads", int)
    hidden = _number(config, "hidden_size", int)
    says = bool(config.get("attention_bias", False))
    bias = says and family in ("llama", "qwen3", "qwen3_moe")
    model = CausalLM(
        family=family,
        vocabulary=_number(config, "vocab_size", int),
        hidden=hidden,
        intermediate=_number(config, "intermediate_size", int),
        layers=_number(config, "num_hidden_layers", int),
        heads=heads,
        kv_heads=_number(config, "num_key_value_heads", int, heads if family == "llama" else None),
        head_dim=_number(
            config, "head_dim", int, QWEN3_HEAD_DIM if family == "qwen3" else hidden // heads
        ),
        norm_eps=_number(config, "rms_norm_eps", float, 1e-6),
        rope=_rope(config),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bias or family == "qwen2" or (says and family == "glm4_moe"),
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family in ("qwen3", "qwen3_moe")
        or (family == "glm4_moe" and bool(config.get("use_qk_norm"))),
        experts=_experts(config, family),
        further=further_layers(_DEFAULTS.get(family, {}) | dict(config)),
    )
    if model.heads % model.kv_heads or model.head_dim % 2 or model.turned % 2:
        raise PolicyError(
            f"{heads} heads of {model.head_dim} do not share {model.kv_heads} key-value heads"
        )
    return model


def is_sparse(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a mixture has experts."""
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    every = int(config.get("decoder_sparse_step") or 1)
    return layer >= int(config.get("first_k_dense_replace") or 0) and (layer + 1) % every == 0


def _experts(config: Mapping[str, Any], family: str) -> Experts | None:
    if family not in ("qwen3_moe", "glm4_moe"):
        return None
    glm, width = family == "glm4_moe", _number(config, "moe_intermediate_size", int)
    count = _number(config, next((key for key in EXPERTS if config.get(key)), EXPERTS[0]), int)
    chosen = _number(config, "num_experts_per_tok", int)
    if chosen > count:
        raise PolicyError(f"a token passes {chosen} of {count} experts")
    groups, groups_chosen = _groups(config, count, chosen) if glm else (1, 1)
    layers = range(_number(config, "num_hidden_layers", int))
    return Experts(
        count=count,
        per_token=chosen,
        width=width,
        scores="sigmoid" if glm else "softmax",
        normed=bool(config.get("norm_topk_prob", glm)),
        layers=tuple(layer for layer in layers if is_sparse(config, layer)),
        shared_width=width * int(config.get("n_shared_experts", 1) or 0) if glm else 0,
        scale=_number(config, "routed_scaling_factor", float, 1.0) if glm else 1.0,
        groups=groups,
        groups_chosen=groups_chosen,
    )


def _groups(config: Mapping[str, Any], count: int, per_token: int) -> tuple[int, int]:
    """Groups of so many experts, and how many of them a token's experts are from."""
    groups, chosen = _number(config, "n_group", int, 1), _number(config, "topk_group", int, 1)
    size = count // groups
    if groups > 1 and (count % groups or size < 2 or chosen > groups or chosen * size < per_token):
        raise PolicyError(
            f"{count} experts in {groups} groups (n_group), of which a token's {per_token} are from"
            f" {chosen} (topk_group): that cannot be"
        )
    return (groups, chosen) if groups > 1 else (1, 1)


def _rope(config: Mapping[str, Any]) -> Rope:
    fields = _rope_fields(config)
    kind, theta = str(fields["rope_type"]), _number(fields, "rope_theta", float)
    share = _number(fields, "partial_rotary_factor", float)
    if kind == "default":
        return Rope(kind=kind, theta=theta, share=share)
    factor = _number(fields, "factor", float)
    if kind == "linear":
        return Rope(kind=kind, theta=theta, share=share, factor=factor)
    return Rope(
        kind=kind,
        theta=theta,
        share=share,
        factor=factor,
        low_freq_factor=_number(fields, "low_freq_factor", float),
        high_freq_factor=_number(fields, "high_freq_factor", float),
        original_tokens=_number(
            fields, "original_max_position_embeddings", int, config.get("max_position_embeddings")
        ),
    )
