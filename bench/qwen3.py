"""Random models of Qwen3's shapes."""

from __future__ import annotations

from typing import Any, Final

VOCABULARY: Final = 151_936
SHAPES: Final[dict[str, dict[str, int]]] = {
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "intermediate_size": 3072},
    "1.7B": {"hidden_size": 2048, "num_hidden_layers": 28, "intermediate_size": 6144},
    "4B": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
    },
    "tiny": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 512,
    },
}
"""From https://huggingface.co/Qwen/Qwen3-0.6B and the larger ones; all tie their heads."""


def vocabulary_of(model: str) -> int:
    return SHAPES[model].get("vocab_size", VOCABULARY)


def config_of(model: str, tokens: int) -> Any:
    """Return a configuration for rows of `tokens`."""
    from transformers import Qwen3Config

    config: Any = Qwen3Config
    given = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": VOCABULARY,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": max(40_960, tokens),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    }
    return config(**given | SHAPES[model])
