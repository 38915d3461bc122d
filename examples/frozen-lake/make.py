"""Writes a model for the lake: a Llama with random weights, and a tokenizer of its words with a
chat template.

    python examples/frozen-lake/make.py DIRECTORY
"""

from __future__ import annotations

import sys
from pathlib import Path

from dora_pipe.launch.examples import Shape, write_word_model

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
SHAPE = Shape(hidden=128, heads=4, context_tokens=128)


def main() -> None:
    """Write the directory and say what is in it."""
    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    parameters = write_word_model(directory, WORDS, ROLES, TEMPLATE, shape=SHAPE)
    sys.stdout.write(f"{directory}: a model of {parameters} parameters\n")


if __name__ == "__main__":
    main()
