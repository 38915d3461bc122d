"""Tests of models that the torch engine supports or rejects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_pipe.core.errors import PolicyError
from dora_pipe.producers.engines.torch.causal_lm import FAMILIES, read_causal_lm
from dora_pipe.producers.engines.torch.rope import Rope

QWEN2: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 128}


MIXTURE = {"n_routed_experts": 8, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
GLM = MIXTURE | {"model_type": "glm4_moe"}


def directory(folder: Path, **changes: Any) -> Path:
    config = {key: value for key, value in (QWEN2 | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_biases_and_head_norms_follow_the_family(family: str, tmp_path: Path) -> None:
    where = directory(
        tmp_path,
        **(MIXTURE if "moe" in family else {}),
        model_type=family,
        attention_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
    )
    model = read_causal_lm(where, context_tokens=64)
    biased = {name.split(".")[-2] for name in model.tensors() if name.endswith(".bias")}
    qkv, out = {"q_proj", "k_proj", "v_proj"}, {"o_proj"}
    assert (
        biased
        == {
            "llama": qkv | out | {"gate_proj", "up_proj", "down_proj"},
            "mistral": set(),
            "qwen2": qkv,
            "qwen3": qkv | out,
            "qwen3_moe": qkv | out,
            "glm4_moe": qkv,
        }[family]
    )
    assert model.qk_norm == (family in ("qwen3", "qwen3_moe"))
    assert model.head_dim == (128 if family == "qwen3" else 32)
    assert "lm_head.weight" not in model.tensors()


@pytest.mark.parametrize(
    ("changes", "rope"),
    [
        ({}, Rope(kind="default", theta=10000.0)),
        ({"rope_theta": 1e6, "rope_scaling": None}, Rope(kind="default", theta=1e6)),
        ({"rope_parameters": {"rope_theta": 7.0}}, Rope(kind="default", theta=7.0)),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}},
            Rope(kind="linear", theta=10000.0, factor=2.0),
        ),
        (
            {"rope_parameters": LLAMA3},
            Rope(
                kind="llama3",
                theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_tokens=8192,
            ),
        ),
    ],
)
def test_rotary_settings_of_both_forms_are_read(
    changes: dict[str, Any], rope: Rope, tmp_path: Path
) -> None:
    assert read_causal_lm(directory(tmp_path, **changes), context_tokens=64).rope == rope


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"model_type": "mixtral"}, "models of type 'mixtral'"),
        ({"model_type": ...}, "models of type None"),
        ({"model_type": ["qwen2"]}, "models of type"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"num_local_experts": 8}, "mixtures of experts of type"),
        (GLM | {"model_type": "qwen3_moe", "n_group": 2}, "chosen group by group"),
        (GLM | {"n_group": 8}, "8 experts in 8 groups (n_group)"),
        (GLM | {"n_group": 3, "topk_group": 2}, "8 experts in 3 groups"),
        (GLM | {"n_group": 2, "topk_group": 3}, "from 3 (topk_group)"),
        (GLM | {"n_group": 4, "num_experts_per_tok": 3}, "a token's 3 are from 1"),
        (GLM | {"num_experts_per_tok": 9}, "9 experts per token of 8"),
        (GLM | {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        (SLIDING, "sliding-window attention over 128 tokens"),
        ({"layer_types": ["chunked_attention"] * 2}, "sliding-window"),
        ({"layer_types": ..., "use_sliding_window": True, "sliding_window": 64}, "64 tokens"),
        ({"model_type": "mistral", "sliding_window": 128}, "over 128 tokens"),
        ({"rope_scaling": {"type": "longrope", "factor": 4}}, "positions of type 'longrope'"),
        ({"rope_scaling": {"type": "yarn"}}, "factor is missing"),
        (MIXTURE | {"model_type": "deepseek_v3"}, "models of type 'deepseek_v3'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "type 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, "a part of the head"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"num_key_value_heads": ...}, "num_key_value_heads is missing"),
        ({"num_key_value_heads": 3}, "do not share 3"),
        ({"vocab_size": "many"}, "vocab_size is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads is missing"),
        ({"head_dim": 33}, "heads of 33"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
    ],
)
def test_other_models_are_refused_in_one_line(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError) as caught:
        read_causal_lm(directory(tmp_path, **changes), context_tokens=256)
    assert line in caught.value.message
    assert str(tmp_path / "config.json") in caught.value.message
    assert "\n" not in caught.value.message
    assert caught.value.hint is not None and "qwen3" in caught.value.hint


def test_a_window_as_long_as_the_context_is_no_window(tmp_path: Path) -> None:
    for changes in (SLIDING, {"model_type": "mistral", "sliding_window": 128}):
        assert read_causal_lm(directory(tmp_path, **changes), context_tokens=128).layers == 2


def test_a_mistral_config_that_is_silent_has_a_window(tmp_path: Path) -> None:
    where = directory(
        tmp_path, model_type="mistral", sliding_window=..., max_position_embeddings=32768
    )
    assert read_causal_lm(where, context_tokens=4096).family == "mistral"
    with pytest.raises(PolicyError, match="4096 tokens"):
        read_causal_lm(where, context_tokens=4097)


def test_no_directory_and_no_config_are_named(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"config\.json"):
        read_causal_lm(tmp_path, context_tokens=8)
    with pytest.raises(PolicyError, match="no model directory"):
        read_causal_lm(tmp_path / "none", context_tokens=8)
