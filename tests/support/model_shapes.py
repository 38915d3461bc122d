"""Model and run configurations for memory estimates, without weights."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

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
    "qwen3": Qwen3Config(**SIZES, attention_bias=True),
    "qwen3 mixture": Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=8),
    "deepseek": DeepseekV3Config(
        **{**NO_HEAD_DIM, "num_key_value_heads": 4},
        **EXPERTS,
        **LATENT,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        q_lora_rank=20,
    ),
}


def plain(config: Any) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return result


def shape_of(config: Any, **more: Any) -> ModelShape:
    return _shape(json.dumps(plain(config) | more))


@cache
def _shape(config: str) -> ModelShape:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(config)
        return model_shape(Path(folder))


def run(**keys: Any) -> Config:
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


QWEN3: dict[str, dict[str, int]] = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28),
    "1.7B": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36),
}


def qwen3(size: str) -> ModelShape:
    sizes: dict[str, Any] = dict(QWEN3[size])
    return shape_of(
        Qwen3Config(
            **sizes,
            vocab_size=151_936,
            num_attention_heads=32 if size == "4B" else 16,
            num_key_value_heads=8,
            head_dim=128,
            tie_word_embeddings=True,
        ),
        dtype="bfloat16",
    )
