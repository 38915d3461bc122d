"""What `init` and the demo start from: a configuration and a small random model for each built-in
task.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

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


CONTEXT_TOKENS: Final = 256


def make_model(directory: Path, task: str) -> int:
    """A small random model with the words of a built-in task; returns its parameters."""
    from dora_pipe.producers.tasks import arithmetic, calculator

    words = {"arithmetic": arithmetic.WORDS, "calculator": calculator.WORDS}[task]
    return write_small_model(directory, words, context_tokens=CONTEXT_TOKENS)


def example_config(task: str, engine: str = "torch") -> str:
    """The text of an example's configuration file."""
    text = example_file(task).read_text()
    section = "[workers]\n"
    assert section in text, f"the example of {task} has no {section}"
    return text if engine == "torch" else text.replace(section, f'{section}engine = "{engine}"\n')


def example_file(task: str) -> Path:
    """Where it lies in the package."""
    return Path(__file__).parent / "templates" / f"{task}.toml"


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
