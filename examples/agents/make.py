"""Writes a small model that stands for one of yours, and the conversations that warm it up.

python examples/agents/make.py DIRECTORY

model/       a Llama with random weights, the words of the task `calculator` and one of a handoff
sft.jsonl    conversations with both agents; a third of the numbers in them is wrong
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dora_pipe.launch.examples import BOS, EOS, PAD, SPECIAL, vocabulary_size, write_word_tokenizer
from dora_pipe.producers.tasks.calculator import CHAT_TEMPLATE, ROLES, WORDS, CalculatorTask
from dora_pipe.producers.tasks.port import Row

HANDOFF = "transfer_to_adder"
ROWS = 4096
CONTEXT_TOKENS = 256
SYSTEM = {"role": "system", "content": "Add the numbers."}
"""None of its words is known: three times `<unk>`, from whichever agent it comes."""


def conversations(chance: random.Random) -> Iterator[Row]:
    """What an assistant that has the calculator says, and one that only hands over."""
    task = CalculatorTask(tools=True, count=ROWS, largest=24, noise=0.33)
    call = {"type": "function", "id": "call00000", "function": {"name": HANDOFF, "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": HANDOFF, "parameters": {"type": "object"}}}]
    for row in task.rows("train"):
        worked = task.conversation(row, chance)
        yield {**worked, "messages": [SYSTEM, *worked["messages"]]}
        yield {"messages": [SYSTEM, *task.prompt(row), asked], "tools": tools}


def write_model(directory: Path) -> None:
    """Write weights, tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    words = (*WORDS, HANDOFF)
    torch.manual_seed(0)
    build: Any = LlamaForCausalLM
    model = build(
        LlamaConfig(
            vocab_size=vocabulary_size(words, ROLES),
            hidden_size=192,
            intermediate_size=768,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=6,
            max_position_embeddings=CONTEXT_TOKENS,
            tie_word_embeddings=False,
            pad_token_id=SPECIAL.index(PAD),
            bos_token_id=SPECIAL.index(BOS),
            eos_token_id=SPECIAL.index(EOS),
        )
    )
    model.save_pretrained(directory)
    write_word_tokenizer(directory, words, ROLES, context_tokens=CONTEXT_TOKENS)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def main() -> None:
    """Write all."""
    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    write_model(directory / "model")
    with (directory / "sft.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in conversations(random.Random(23)))


if __name__ == "__main__":
    main()
