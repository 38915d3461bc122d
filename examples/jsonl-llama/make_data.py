"""Write the data of this example, train.jsonl and eval.jsonl: words to reverse.

    python examples/jsonl-llama/make_data.py

The repository contains the files. They share no word.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

LETTERS = "abcdefgh"
TRAIN_ROWS, EVAL_ROWS = 900, 64
FOLDER = Path(__file__).parent / "data"


def main() -> None:
    """Write both files."""
    chance = random.Random(20)
    words: dict[str, None] = {}
    while len(words) < TRAIN_ROWS + EVAL_ROWS:
        words["".join(chance.choices(LETTERS, k=chance.randint(3, 5)))] = None
    rows = [
        {"prompt": f"turn {word} around:", "answer": word[::-1], "letters": len(word)}
        for word in words
    ]
    for name, part in (("train", rows[:TRAIN_ROWS]), ("eval", rows[TRAIN_ROWS:])):
        lines = (json.dumps(row) + "\n" for row in part)
        (FOLDER / f"{name}.jsonl").write_text("".join(lines))


if __name__ == "__main__":
    main()
