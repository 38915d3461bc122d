"""Writes a small chat model for the texts of a configured task: a Llama with random weights, and a
byte-level BPE tokenizer, learnt from the task's prompts, with a ChatML template.

    python examples/reasoning-gym/make.py CONFIG DIRECTORY
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from pathlib import Path
from typing import Any

from dora_pipe.config.load import load_config
from dora_pipe.launch.examples import Shape, write_chat_model
from dora_pipe.producers.tasks.registry import open_task

VOCABULARY = 512
SHAPE = Shape(hidden=128, heads=4, kv_heads=2, context_tokens=1024)
READ_ROWS = 256
"""Number of rows whose prompts train the tokenizer."""


async def texts(config: Path) -> list[str]:
    """Yield the first message of the task for each row."""
    task = open_task(load_config(config, ()).task)
    contents = []
    for row in task.rows("train")[:READ_ROWS]:
        world = task.environment(row)
        prompt: Any = task.prompt(row) if world is None else world.reset(row)
        prompt = await prompt if inspect.isawaitable(prompt) else prompt
        messages = [{"content": prompt}] if isinstance(prompt, str) else prompt
        contents += [str(message["content"]) for message in messages]
        close: Any = None if world is None else world.close
        closing = close() if close else None
        if inspect.isawaitable(closing):
            await closing
    return contents


def main() -> None:
    """Write the directory and say what is in it."""
    if len(sys.argv) != 3:
        sys.exit("usage: make.py CONFIG DIRECTORY")
    config, directory = map(Path, sys.argv[1:])
    directory.mkdir(parents=True, exist_ok=True)
    read = asyncio.run(texts(config))
    parameters, vocabulary = write_chat_model(directory, read, shape=SHAPE, vocabulary=VOCABULARY)
    sys.stdout.write(f"{directory}: {parameters} parameters, {vocabulary} tokens\n")


if __name__ == "__main__":
    main()
