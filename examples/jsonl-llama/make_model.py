"""Write a tiny Llama with grouped-query attention and a tokenizer trained on the data.

    python examples/jsonl-llama/make_model.py DIRECTORY

Use your own model directory instead: any Hugging Face causal LM with full attention.
Weights are random; README.md describes the warm-up.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
VOCABULARY = 320
CONTEXT_TOKENS = 128
PAD, BOS, EOS = "<pad>", "<s>", "</s>"


def make_tokenizer(directory: Path) -> int:
    """A byte-level BPE tokenizer, trained on prompts and answers; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    lines = (HERE / "data" / "train.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = Tokenizer(models.BPE())
    # Words are split before merging, answers into single letters: they are what is turned around.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(" ", behavior="merged_with_next"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=len(rows) // 2,
        show_progress=False,
    )
    tokenizer.train_from_iterator((row["prompt"] for row in rows), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS).save_pretrained(
        directory
    )
    size: int = tokenizer.get_vocab_size()
    return size


def make_model(directory: Path, vocabulary: int) -> int:
    """The model with random weights; returns the number of its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    model.save_pretrained(directory)
    return sum(weights.numel() for weights in model.parameters())


def main() -> None:
    """Write the directory and say what is in it."""
    if len(sys.argv) != 2:
        sys.exit("usage: make_model.py DIRECTORY")
    directory = Path(sys.argv[1])
    vocabulary = make_tokenizer(directory)
    parameters = make_model(directory, vocabulary)
    sys.stdout.write(f"{directory}: {parameters} parameters, {vocabulary} tokens\n")


if __name__ == "__main__":
    main()
