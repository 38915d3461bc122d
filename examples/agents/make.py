"""Write a small model in place of yours, and conversations for its warm-up.

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

from dora_pipe.launch.examples import Shape, write_word_model
from dora_pipe.producers.tasks.calculator import CHAT_TEMPLATE, ROLES, WORDS, CalculatorTask
from dora_pipe.producers.tasks.task import Row

HANDOFF = "transfer_to_adder"
ROWS = 4096
SHAPE = Shape(hidden=192, heads=6, context_tokens=256)
SYSTEM = {"role": "system", "content": "Add the numbers."}
"""None of its words is known: three times `<unk>`, from whichever agent it comes."""


def conversations(chance: random.Random) -> Iterator[Row]:
    """Yield turns of an assistant with the calculator, and of one that hands over."""
    task = CalculatorTask(tools=True, count=ROWS, largest=24, noise=0.33)
    call = {"type": "function", "id": "call00000", "function": {"name": HANDOFF, "arguments": {}}}
    asked = {"role": "assistant", "content": "", "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": HANDOFF, "parameters": {"type": "object"}}}]
    for row in task.rows("train"):
        worked = task.conversation(row, chance)
        yield {**worked, "messages": [SYSTEM, *worked["messages"]]}
        yield {"messages": [SYSTEM, *task.prompt(row), asked], "tools": tools}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    words = (*WORDS, HANDOFF)
    write_word_model(directory / "model", words, ROLES, CHAT_TEMPLATE, shape=SHAPE)
    with (directory / "sft.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in conversations(random.Random(23)))


if __name__ == "__main__":
    main()
