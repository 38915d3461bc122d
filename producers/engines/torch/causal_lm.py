"""Decides which Hugging Face causal language models the torch engine takes, from config.json alone.

Taken are decoders with full attention, rotary positions, RMS norms before each block and a gated
SiLU block: the families in `FAMILIES`. Whatever a config says beyond that is refused in one line,
because a model that runs but computes something else would be worse than none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from dora_pipe.core.errors import PolicyError
from dora_pipe.store.model_dir import read_config

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("default", "linear", "llama3")
"""Rotary frequencies that do not depend on the length of the sequence."""
MISTRAL_WINDOW_TOKENS = 4096
"""What a mistral config without the key means."""
QWEN3_HEAD_DIM = 128
"""What a qwen3 config without the key means."""

_HINT = "the torch engine takes full-attention models of the families " + ", ".join(FAMILIES)
N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """Rotary positions; the fields after `theta` belong to linear and llama3 scaling."""

    kind: str
    theta: float
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_tokens: int = 0


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
            for name, shape in self._layer_tensors().items():
                shapes[f"model.layers.{layer}.{name}"] = shape
        return shapes

    def _layer_tensors(self) -> dict[str, tuple[int, ...]]:
        hidden, queries = self.hidden, self.heads * self.head_dim
        keys = self.kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (queries, hidden, self.qkv_bias),
            "self_attn.k_proj": (keys, hidden, self.qkv_bias),
            "self_attn.v_proj": (keys, hidden, self.qkv_bias),
            "self_attn.o_proj": (hidden, queries, self.out_bias),
            "mlp.gate_proj": (self.intermediate, hidden, self.mlp_bias),
            "mlp.up_proj": (self.intermediate, hidden, self.mlp_bias),
            "mlp.down_proj": (hidden, self.intermediate, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{name}.bias"] = (rows,)
        if self.qk_norm:
            shapes |= {f"self_attn.{which}_norm.weight": (self.head_dim,) for which in "qk"}
        return shapes


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
    if any("expert" in key and value for key, value in config.items()):
        return "mixtures of experts are not supported"
    if config.get("hidden_act", "silu") != "silu":
        return f"the activation {config['hidden_act']!r} is not supported"
    window = _window(config, family)
    if window is not None and window < context_tokens:
        return f"sliding-window attention over {window} tokens is not supported"
    kind = _rope_fields(config).get("rope_type", "default")
    if kind not in ROPE_KINDS:
        return f"rotary positions of type {kind!r} are not supported"
    if _rope_fields(config).get("partial_rotary_factor", 1.0) != 1.0:
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
    fields.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0)
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
    bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3")
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
        qkv_bias=bias or family == "qwen2",
        out_bias=bias,
        mlp_bias=bool(config.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
    )
    if model.heads % model.kv_heads or model.head_dim % 2:
        raise PolicyError(
            f"{heads} heads of {model.head_dim} do not share {model.kv_heads} key-value heads"
        )
    return model


def _rope(config: Mapping[str, Any]) -> Rope:
    fields = _rope_fields(config)
    kind, theta = str(fields["rope_type"]), _number(fields, "rope_theta", float)
    if kind == "default":
        return Rope(kind=kind, theta=theta)
    factor = _number(fields, "factor", float)
    if kind == "linear":
        return Rope(kind=kind, theta=theta, factor=factor)
    return Rope(
        kind=kind,
        theta=theta,
        factor=factor,
        low_freq_factor=_number(fields, "low_freq_factor", float),
        high_freq_factor=_number(fields, "high_freq_factor", float),
        original_tokens=_number(
            fields, "original_max_position_embeddings", int, config.get("max_position_embeddings")
        ),
    )
