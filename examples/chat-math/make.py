"""Writes what a user has already: a chat model with random weights, its tokenizer with a ChatML
template, and Parquet files of conversations about sums.

    python examples/chat-math/make.py DIRECTORY

    random/           a Llama with grouped-query attention, byte-level BPE, chat_template.jinja
    sft.parquet       whole conversations; a quarter of the steps in their answers is wrong
    train.parquet     questions with the right answer; what is trained on
    short.parquet     questions of 3 numbers, to evaluate on; none of them is trained on
    long.parquet      the same of 4 and 5
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_pipe.launch.examples import Shape, write_chat_model

SYSTEM = "You add numbers. Put the result into \\boxed{}."
LARGEST = 6
WRONG_SHARE = 0.25
"""Of the steps of the answers that the model is warmed up on."""

WORDY_SHARE = 0.5
"""Share of those answers that begin with a useless sentence."""

ROWS = {"short": 64, "long": 64, "train": 4000, "sft": 6000}
SIZES = {"sft": (3, 5), "train": (3, 5), "short": (3, 3), "long": (4, 5)}
"""How many numbers a question has, at least and at most."""

VOCABULARY = 420
SHAPE = Shape(hidden=192, heads=6, kv_heads=2, context_tokens=128)


def numbers_of(name: str, chance: random.Random, taken: set[tuple[int, ...]]) -> tuple[int, ...]:
    """The numbers of one more question of a file; none of `taken`."""
    while True:
        size = chance.randint(*SIZES[name])
        numbers = tuple(chance.randint(0, LARGEST) for _ in range(size))
        if numbers not in taken:
            return numbers


def question(numbers: Sequence[int]) -> str:
    """``question([4, 7]) == "What is 4 + 7?"``"""
    return f"What is {' + '.join(map(str, numbers))}?"


def worked(numbers: Sequence[int], chance: random.Random) -> str:
    """An answer, step by step, some of them wrong."""
    total, steps = numbers[0], []
    for number in numbers[1:]:
        wrong = chance.choice((-2, -1, 1, 2)) if chance.random() < WRONG_SHARE else 0
        subtotal = max(0, total + number + wrong)
        steps.append(f"{total} + {number} = {subtotal}.")
        total = subtotal
    opening = "Let me think about it step by step. " if chance.random() < WORDY_SHARE else ""
    return f"{opening}{' '.join(steps)} \\boxed{{{total}}}"


def rows(chance: random.Random) -> dict[str, list[dict[str, Any]]]:
    rows_by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    evaluated: set[tuple[int, ...]] = set()
    for name, count in ROWS.items():
        for _ in range(count):
            numbers = numbers_of(name, chance, evaluated)
            asked = {"role": "user", "content": question(numbers)}
            if name == "sft":
                answer = {"role": "assistant", "content": worked(numbers, chance)}
                system = {"role": "system", "content": SYSTEM}
                rows_by_name[name].append({"messages": [system, asked, answer]})
            else:
                rows_by_name[name].append({"messages": [asked], "answer": str(sum(numbers))})
            if name in ("short", "long"):
                evaluated.add(numbers)
    return rows_by_name


def main() -> None:
    """Write the directory and say what is in it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    model = directory / "random"
    model.mkdir(parents=True, exist_ok=True)
    tables = rows(random.Random(17))
    for name, table in tables.items():
        pq.write_table(pa.Table.from_pylist(table), directory / f"{name}.parquet")
    texts = [str(message["content"]) for row in tables["sft"] for message in row["messages"]]
    parameters, vocabulary = write_chat_model(model, texts, shape=SHAPE, vocabulary=VOCABULARY)
    sys.stdout.write(
        f"{directory}: a model of {parameters} parameters and {vocabulary} tokens, "
        f"{', '.join(f'{len(table)} rows of {name}' for name, table in tables.items())}\n"
    )


if __name__ == "__main__":
    main()
