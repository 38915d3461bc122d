"""Tiny Hugging Face models with random weights and their own tokenizers.

`make_qwen2` has the shape of the demo's policy (0.55 M parameters, one character per token).
`make_llama_gqa` differs where bugs hide: grouped-query attention, tied embeddings, sharded weights,
scaled rotary frequencies, a byte-level tokenizer with a `<s>` prefix. `make_qwen3_moe` and
`make_glm4_moe` have eight experts; the latter adds shared experts after a dense layer.
`make_grouped` routes within one of two groups; `make_further` adds a multi-token prediction layer.
`make_deepseek_v2` and `make_deepseek_v3` add latent attention; the former has no query latent, and
yarn-scaled positions.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
"""Special token ids of both tokenizers."""
SPECIAL = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}
QWEN2_VOCABULARY = 4 + 1 + 95
"""Special tokens, newline and printable ASCII."""
LLAMA_VOCABULARY = 3 + 256
"""Special tokens and one token per byte."""


def make_qwen2(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    """Write a 0.55 M-parameter Qwen2 with a character tokenizer. `scale` widens the logits
    (random weights are almost uniform); `changes` override the config."""
    settings: dict[str, Any] = dict(
        vocab_size=QWEN2_VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=False,
        **SPECIAL,
    )
    model = _built(Qwen2ForCausalLM, Qwen2Config, settings | changes, seed)
    return _save(model, character_tokenizer(), directory, scale)


def make_llama_gqa(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    settings: dict[str, Any] = dict(
        vocab_size=LLAMA_VOCABULARY,
        hidden_size=144,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=context_tokens,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **SPECIAL,
    )
    model = _built(LlamaForCausalLM, LlamaConfig, settings | changes, seed)
    return _save(model, byte_tokenizer(), directory, scale, max_shard_size="1MB")


MIXTURE: dict[str, Any] = dict(
    vocab_size=QWEN2_VOCABULARY,
    hidden_size=64,
    intermediate_size=160,
    moe_intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts_per_tok=2,
    norm_topk_prob=True,
    **SPECIAL,
)


def make_qwen3_moe(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    settings = MIXTURE | dict(num_experts=8, max_position_embeddings=context_tokens)
    model = _built(Qwen3MoeForCausalLM, Qwen3MoeConfig, settings | changes, seed)
    return _save(model, character_tokenizer(), directory, scale)


def make_glm4_moe(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    settings = MIXTURE | dict(
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        attention_bias=True,
        use_qk_norm=True,
        max_position_embeddings=context_tokens,
    )
    model = _built(Glm4MoeForCausalLM, Glm4MoeConfig, settings | changes, seed)
    return _save(_balanced(model), character_tokenizer(), directory, scale)


LATENTS: dict[str, Any] = {name: one for name, one in MIXTURE.items() if name != "head_dim"} | dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    n_shared_experts=1,
    first_k_dense_replace=1,
    routed_scaling_factor=1.5,
    kv_lora_rank=24,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
)


def make_deepseek_v3(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    settings = LATENTS | dict(
        q_lora_rank=20,
        n_group=2,
        topk_group=1,
        num_nextn_predict_layers=0,
        max_position_embeddings=context_tokens,
    )
    model = _built(DeepseekV3ForCausalLM, DeepseekV3Config, settings | changes, seed)
    return _save(_balanced(model), character_tokenizer(), directory, scale)


def make_deepseek_v2(
    directory: Path, seed: int = 0, *, context_tokens: int = 512, scale: float = 1.0, **changes: Any
) -> Path:
    settings = LATENTS | dict(
        q_lora_rank=None,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        attention_bias=True,
        max_position_embeddings=context_tokens,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 8.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    )
    model = _built(DeepseekV2ForCausalLM, DeepseekV2Config, settings | changes, seed)
    return _save(model, character_tokenizer(), directory, scale)


def _balanced(model: Any) -> Any:
    for name, choice in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            choice.normal_(std=0.02)
    return model


def make_grouped(directory: Path, seed: int = 0, **options: Any) -> Path:
    return make_glm4_moe(directory, seed, **{"n_group": 2, "topk_group": 1} | options)


def make_further(directory: Path, seed: int = 0, **options: Any) -> Path:
    """Write `make_grouped` with a multi-token prediction layer, as published models have: a
    decoder layer and its own matrices."""
    make_grouped(directory, seed, num_nextn_predict_layers=1, **options)
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    last, behind = "model.layers.1.", "model.layers.2."
    layer = {name: tensor + 0.5 for name, tensor in tensors.items() if name.startswith(last)}
    tensors |= {name.replace(last, behind): entry for name, entry in layer.items()}
    tensors[f"{behind}eh_proj.weight"] = torch.ones(64, 128)
    save_file(tensors, weights, metadata={"format": "pt"})
    return directory


def _built(build: Any, config: Any, settings: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return build(config(**settings))


def character_tokenizer() -> Any:
    characters = "\n " + string.digits + string.ascii_letters + string.punctuation
    return _byte_level(["<pad>", "<bos>", "<eos>", "<unk>"], characters.encode())


def byte_tokenizer() -> Any:
    return _byte_level(["<pad>", "<s>", "</s>"], bytes(range(256)), prefix="<s>")


def _byte_level(specials: list[str], alphabet: bytes, prefix: str = "") -> Any:
    names = specials + [_BYTE_NAMES[byte] for byte in alphabet]
    vocabulary = {name: number for number, name in enumerate(names)}
    unknown = "<unk>" if "<unk>" in specials else None
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if prefix:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{prefix} $A", special_tokens=[(prefix, vocabulary[prefix])]
        )
    wrap: Any = PreTrainedTokenizerFast
    return wrap(
        tokenizer_object=tokenizer,
        pad_token=specials[PAD_ID],
        bos_token=specials[BOS_ID],
        eos_token=specials[EOS_ID],
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )


def _byte_names() -> list[str]:
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    indices = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + number) for number, byte in enumerate(indices)}
    return [names[byte] for byte in range(256)]


_BYTE_NAMES = _byte_names()


def _save(model: Any, tokenizer: Any, directory: Path, scale: float, **options: Any) -> Path:
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if name.endswith("bias"):
                weights.normal_(std=0.02)  # zero biases would hide missing ones
            elif weights.dim() == 1:
                weights.add_(torch.randn_like(weights) * 0.1)
        model.get_output_embeddings().weight.mul_(scale)
    model.float().eval().save_pretrained(directory, **options)
    tokenizer.save_pretrained(directory)
    return directory
