"""The sizes of a causal LM from its config.json alone; decides how its numbers are counted.

Decoders of the Llama kind (gated blocks, grouped queries), latent attention (DeepSeek-V2,
arXiv 2405.04434), and mixtures of experts with or without shared ones. A test counts the parameters
of transformers' own networks beside these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.causal_lm import EXPERTS, is_sparse

QK_NORM: Final = ("qwen3", "qwen3_moe")
"""Families that always scale queries and keys; others say `use_qk_norm`."""

QKV_BIAS: Final = ("qwen2", "qwen2_moe")
"""Families whose queries, keys and values have a bias unless the config says otherwise."""

NO_OUT_BIAS: Final = ("qwen2", "qwen2_moe", "glm4_moe")
"""Families whose projection behind attention has no bias, whatever the others have."""

HINT: Final = "the estimate is of decoders of the Llama kind: Llama, Mistral, Qwen, DeepSeek, GLM"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's attention, in numbers per token but for `parameters`."""

    heads: int
    """Of queries."""
    queries: int
    """Of all heads together; as wide as what is multiplied with the values' weights."""
    keys: int
    values: int
    out: int
    """What goes into the projection behind attention."""
    normed: int
    """Numbers of queries and keys that are scaled by a norm of their own."""
    kept: int
    """What a KV cache holds of a token."""
    parameters: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One layer's feed-forward block."""

    width: int
    """Of the gated block that every token passes: the dense one, or shared experts; 0: none."""
    experts: int = 0
    per_token: int = 0
    expert_width: int = 0
    router: int = 0
    """Parameters of the router and of what weighs shared experts."""

    def parameters(self, hidden: int, bias: bool, *, active: bool = False) -> int:
        """Of the whole block, or of what one token passes."""
        count = self.per_token if active else self.experts
        biases = 2 * self.width + hidden if bias else 0
        gated = 3 * hidden * (self.width + count * self.expert_width)
        return gated + biases + self.router


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Example: ``model_shape(json.loads(Path("m/config.json").read_text())).parameters``"""

    family: str
    dtype: str
    """What the config says of its weights; empty where it does not."""
    vocabulary: int
    hidden: int
    attention: Attention
    blocks: tuple[Block, ...]
    """By layer."""
    linears: Mapping[str, int]
    """Rows and columns, added up, of the layers that an adapter may stand beside; all layers'."""
    tied: bool
    parameters: int
    active: int
    """Parameters that one token passes."""
    quantized: bool = False
    """Whether its files are, as the config has it."""

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.blocks)

    @property
    def kv_values(self) -> int:
        """Numbers that a KV cache holds of a token, over all layers."""
        return self.layers * self.attention.kept

    @property
    def expert_matrices(self) -> int:
        """Parameters of the experts that routers choose among, of all layers."""
        return sum(3 * self.hidden * one.experts * one.expert_width for one in self.blocks)

    @property
    def hidden_matrices(self) -> int:
        """Parameters of the layers' matrices, norms and biases with them; experts are stacked."""
        return self.parameters - self._ends - self.expert_matrices

    @property
    def _ends(self) -> int:
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def mixture(self) -> Block | None:
        """A layer with experts, if there is one."""
        return next((one for one in self.blocks if one.experts), None)

    @property
    def largest(self) -> int:
        """Numbers of the largest tensor, which is the embedding or the widest block's."""
        widest = max(max(one.width, one.expert_width) for one in self.blocks)
        return self.hidden * max(self.vocabulary, widest)

    @property
    def largest_trained(self) -> int:
        """The same of the tensors that transformers has, which are all experts of a layer at
        once, gate and up together."""
        stacked = max(one.experts * 2 * one.expert_width for one in self.blocks)
        return max(self.largest, self.hidden * stacked)


def model_shape(config: Mapping[str, Any], parameters: int | None = None) -> ModelShape:
    """The sizes that a config.json tells; `parameters` where weights are there to be counted.

    Raises PolicyError for a config that lacks one.
    """
    hidden, layers = _number(config, "hidden_size"), _number(config, "num_hidden_layers")
    vocabulary = _number(config, "vocab_size")
    attention = _latent(config) if config.get("kv_lora_rank") else _grouped(config)
    blocks = tuple(_block(config, layer) for layer in range(layers))
    tied = bool(config.get("tie_word_embeddings"))
    outside = vocabulary * hidden * (1 if tied else 2) + hidden
    each = layers * (attention.parameters + 2 * hidden)
    bias = bool(config.get("mlp_bias"))
    whole, active = (
        outside + each + sum(one.parameters(hidden, bias, active=chosen) for one in blocks)
        for chosen in (False, True)
    )
    return ModelShape(
        family=str(config.get("model_type") or ""),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or ""),
        vocabulary=vocabulary,
        hidden=hidden,
        attention=attention,
        blocks=blocks,
        linears=_linears(hidden, attention, blocks),
        tied=tied,
        parameters=parameters or whole,
        active=min(active, parameters or whole),
        quantized=bool(config.get("quantization_config")),
    )


def _grouped(config: Mapping[str, Any]) -> Attention:
    family, hidden = config.get("model_type"), _number(config, "hidden_size")
    heads = _number(config, "num_attention_heads")
    width = _number(config, "head_dim", max(1, hidden // heads))
    kv_heads = _number(config, "num_key_value_heads", heads)
    queries, keys = heads * width, kv_heads * width
    qk_norm = family in QK_NORM or bool(config.get("use_qk_norm"))
    by_default = family in QKV_BIAS
    bias = config.get("qkv_bias" if by_default else "attention_bias", by_default)
    biases = (queries + 2 * keys + (0 if family in NO_OUT_BIAS else hidden)) if bias else 0
    return Attention(
        heads=heads,
        queries=queries,
        keys=keys,
        values=keys,
        out=queries,
        normed=queries + keys if qk_norm else 0,
        kept=2 * keys,
        parameters=2 * hidden * (queries + keys) + biases + (2 * width if qk_norm else 0),
    )


def _latent(config: Mapping[str, Any]) -> Attention:
    """Keys and values of all heads are made of one latent vector, which alone is cached."""
    hidden, heads = _number(config, "hidden_size"), _number(config, "num_attention_heads")
    latent, rope = _number(config, "kv_lora_rank"), _number(config, "qk_rope_head_dim")
    plain, value = _number(config, "qk_nope_head_dim"), _number(config, "v_head_dim")
    queries = heads * (plain + rope)
    rank = config.get("q_lora_rank")
    by_queries = (
        hidden * queries if not rank else int(rank) * (hidden + queries) + int(rank)  # and a norm
    )
    by_keys = hidden * (latent + rope) + latent + latent * heads * (plain + value)
    return Attention(
        heads=heads,
        queries=queries,
        keys=queries,
        values=heads * value,
        out=heads * value,
        normed=latent + int(rank or 0),
        kept=latent + rope,
        parameters=by_queries + by_keys + heads * value * hidden,
    )


def _block(config: Mapping[str, Any], layer: int) -> Block:
    """The block of a layer: families name experts, and layers without them, differently."""
    count = next((config[key] for key in EXPERTS if config.get(key)), 0)
    if not count or not is_sparse(config, layer):
        return Block(width=_number(config, "intermediate_size"))
    hidden, experts = _number(config, "hidden_size"), int(count)
    width = _number(config, "moe_intermediate_size", config.get("intermediate_size"))
    alone = config.get("shared_expert_intermediate_size")  # weighed by a gate of its own
    shared = int(alone or 0) or width * int(config.get("n_shared_experts") or 0)
    return Block(
        width=shared,
        experts=experts,
        per_token=_number(config, "num_experts_per_tok"),
        expert_width=width,
        router=hidden * experts + (hidden if alone else 0),
    )


def _linears(hidden: int, attention: Attention, blocks: tuple[Block, ...]) -> dict[str, int]:
    layers = len(blocks)
    dense = sum(hidden + one.width for one in blocks if one.width)
    return {
        "q_proj": layers * (hidden + attention.queries),
        "k_proj": layers * (hidden + attention.keys),
        "v_proj": layers * (hidden + attention.values),
        "o_proj": layers * (attention.out + hidden),
        "gate_proj": dense,
        "up_proj": dense,
        "down_proj": dense,
    }


def _number(config: Mapping[str, Any], key: str, default: Any = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise PolicyError(f"config.json: {key} is missing or is no positive number", hint=HINT)
    return value
