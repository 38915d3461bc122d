"""Writes questions for the calculator of the MCP server: conversations with their answers.

python examples/mcp/make.py DIRECTORY

train.jsonl, eval.jsonl    {"prompt": [a user's message], "answer": "answer 16"}
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

ROWS = {"train": 2048, "eval": 128}
LARGEST = 9


def main() -> None:
    """Write both files."""
    if len(sys.argv) != 2:
        sys.exit("usage: make.py DIRECTORY")
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    chance = random.Random(23)
    for name, count in ROWS.items():
        with (directory / f"{name}.jsonl").open("w") as file:
            for _ in range(count):
                numbers = [chance.randint(0, LARGEST) for _ in range(chance.randint(2, 4))]
                named = (
                    f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers)
                )
                asked = [{"role": "user", "content": " ".join(named)}]
                row = {"prompt": asked, "answer": f"answer {sum(numbers) % 100}"}
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
