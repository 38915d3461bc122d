"""Configurations of models and of runs whose memory is estimated, without weights."""

from __future__ import annotations

import json
from typing import Any

from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from dora_pipe.config.load import from_plain
from dora_pipe.config.model import Config
from dora_pipe.launch.model_shape import ModelShape, model_shape

SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
)
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=48)
LATENT: dict[str, Any] = dict(
    kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_group=1, topk_group=1
)
NO_HEAD_DIM = {key: value for key, value in SIZES.items() if key != "head_dim"}
NETWORKS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "llama with biases": LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "qwen2": Qwen2Config(**NO_HEAD_DIM),
    "qwen3": Qwen3Config(**SIZES, attention_bias=True),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3 mixture": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_experts=8, mlp_only_layers=[1], decoder_sparse_step=2
    ),
    "qwen2 mixture": Qwen2MoeConfig(
        **NO_HEAD_DIM, **EXPERTS, num_experts=8, shared_expert_intermediate_size=40
    ),
    "deepseek": DeepseekV3Config(
        **{**NO_HEAD_DIM, "num_key_value_heads": 4},
        **EXPERTS,
        **LATENT,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        q_lora_rank=20,
    ),
    "glm": Glm4MoeConfig(
        **SIZES,
        **EXPERTS,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=2,
        n_group=1,
        topk_group=1,
        use_qk_norm=True,
        attention_bias=True,
    ),
}


def plain(config: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return found


def shape_of(config: Any, **more: Any) -> ModelShape:
    return model_shape(plain(config) | more)


def run(**keys: Any) -> Config:
    """A configuration with vLLM and other values of keys, as `section__key`."""
    table: dict[str, Any] = {
        "run": {"name": "r", "steps": 1},
        "model": {"path": "m"},
        "task": {"kind": "arithmetic"},
        "workers": {"engine": "vllm"},
        "trainer": {"device": "cuda"},
    }
    for dotted, value in keys.items():
        section, name = dotted.split("__")
        table.setdefault(section, {})[name] = value
    return from_plain(table)


BILLIONS = shape_of(
    Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    dtype="bfloat16",
)
