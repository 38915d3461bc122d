"""Write a small model in place of yours, and conversations for its warm-up.

python examples/verifiers/make.py DIRECTORY

model/       a Llama with random weights and the words of the task `calculator`
sft.jsonl    sums with the calculator and without; a third of the numbers in calls is wrong
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

ROWS = 4096
SHAPE = Shape(hidden=192, heads=6, context_tokens=256)


def conversations(chance: random.Random) -> Iterator[Row]:
    """Return conversations with the tool `calculator`, or as a single answer without it."""
    task = CalculatorTask(tools=True, count=ROWS, largest=24, noise=0.33)
    for row in task.rows("train"):
        yield task.conversation(row, chance)
        answer = {"role": "assistant", "content": f"answer {sum(row['numbers']) % 100}"}
        yield {"messages": [*task.prompt(row), answer]}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    write_word_model(directory / "model", WORDS, ROLES, CHAT_TEMPLATE, shape=SHAPE)
    with (directory / "sft.jsonl").open("w") as file:
        file.writelines(json.dumps(row) + "\n" for row in conversations(random.Random(23)))


if __name__ == "__main__":
    main()
