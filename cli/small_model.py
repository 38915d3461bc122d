"""A small causal LM with a word-level tokenizer for the built-in tasks, random from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_pipe.producers.tasks.vocabulary import (
    BOS,
    EOS,
    PAD,
    SPECIAL,
    vocabulary_size,
    write_word_tokenizer,
)

HIDDEN = 192
LAYERS = 2
HEADS = 6
"""Of 32 each: of the sizes that vLLM's kernels for CPUs have, the smallest."""


def write_small_model(
    directory: Path,
    words: Sequence[str],
    *,
    context_tokens: int,
    seed: int = 0,
) -> int:
    """Write a Llama of about 1 200 000 parameters over `words`; returns their number.

    hidden 192, 2 layers, 6 heads, intermediate 768: it learns the built-in tasks on one core.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(seed)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary_size(words),
            hidden_size=HIDDEN,
            intermediate_size=4 * HIDDEN,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS,
            max_position_embeddings=context_tokens,
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
        )
    ).float()
    model.save_pretrained(directory)
    write_word_tokenizer(directory, words, context_tokens=context_tokens)
    return sum(weights.numel() for weights in model.parameters())
