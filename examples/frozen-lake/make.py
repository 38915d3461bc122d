"""Writes a model for the lake: a Llama with random weights, and a tokenizer of its words with a
chat template.

    python examples/frozen-lake/make.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from dora_pipe.launch.examples import BOS, EOS, PAD, SPECIAL, vocabulary_size, write_word_tokenizer

FIELDS = 16
WORDS = (
    *("left", "down", "right", "up", "error:", "an", "action", "is", "one", "of"),
    *("left,", "down,", "right,"),
    *(str(field) for field in range(FIELDS)),
)
ROLES = ("<|user|>", "<|assistant|>")
TEMPLATE = """\
{%- for message in messages -%}
<|{{ message.role }}|> {{ message.content }}<eos>
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}
"""
CONTEXT_TOKENS = 128


def main() -> None:
    """Write the directory and say what is in it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary_size(WORDS, ROLES),
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
        )
    )
    model.save_pretrained(directory)
    write_word_tokenizer(directory, WORDS, ROLES, context_tokens=CONTEXT_TOKENS)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    parameters = sum(weights.numel() for weights in model.parameters())
    sys.stdout.write(f"{directory}: a model of {parameters} parameters\n")


if __name__ == "__main__":
    main()
