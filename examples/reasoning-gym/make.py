"""Writes a small chat model for the texts of a configured task: a Llama with random weights, and a
byte-level BPE tokenizer, learnt from the task's prompts, with a ChatML template.

    python examples/reasoning-gym/make.py CONFIG DIRECTORY
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_pipe.config.load import load_config
from dora_pipe.producers.tasks.registry import open_task

VOCABULARY = 512
CONTEXT_TOKENS = 1024
READ_ROWS = 256
"""Prompts of so many rows are what the tokenizer is learnt from."""

PAD, END, START, STOP = "<pad>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


async def texts(config: Path) -> list[str]:
    """What the task says first, row by row."""
    task = open_task(load_config(config, ()).task)
    found = []
    for row in task.rows("train")[:READ_ROWS]:
        world = task.environment(row)
        prompt: Any = task.prompt(row) if world is None else world.reset(row)
        prompt = await prompt if inspect.isawaitable(prompt) else prompt
        said = [{"content": prompt}] if isinstance(prompt, str) else prompt
        found += [str(one["content"]) for one in said]
        close: Any = None if world is None else world.close
        closing = close() if close else None
        if inspect.isawaitable(closing):
            await closing
    return found


def make_tokenizer(directory: Path, read: Sequence[str]) -> int:
    """Write it; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, END, START, STOP],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(read, trainer)
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=STOP).save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    size: int = tokenizer.get_vocab_size()
    return size


def make_model(directory: Path, vocabulary: int) -> int:
    """Write it with random weights; returns the number of its parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=3,
        )
    )
    model.save_pretrained(directory)
    return sum(weights.numel() for weights in model.parameters())


def main() -> None:
    """Write the directory and say what is in it."""
    if len(sys.argv) != 3:
        sys.exit("usage: make.py CONFIG DIRECTORY")
    config, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = make_tokenizer(directory, asyncio.run(texts(config)))
    parameters = make_model(directory, vocabulary)
    sys.stdout.write(f"{directory}: {parameters} parameters, {vocabulary} tokens\n")


if __name__ == "__main__":
    main()
