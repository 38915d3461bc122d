"""An agent that adds numbers with a calculator: two sub-agents at the same time, one for the first
two numbers and one for the others, and then one that adds what they found. After two results a
conversation is compacted: what is left to add becomes a new one.

It is a script of the package `openai` and knows nothing of what trains it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import openai

TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Add two numbers, modulo 100.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
HTTP = openai.DefaultAsyncHttpxClient(timeout=300)
"""Of all trajectories: a client that makes its own takes 30 ms of CPU for that. Where hundreds
begin at once on a busy machine, a connection may take longer than the 5 s of `openai`."""

TURNS_MAX = 6
RESULTS_MAX = 2
"""Number of calculator results in a conversation before it is compacted."""


async def run(base_url: str, api_key: str, row: Mapping[str, Any]) -> str:
    """The sum of `row["numbers"]`, as the model finds it."""
    numbers = row["numbers"]
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=HTTP)
    first, others = await asyncio.gather(
        add_up(client, numbers[:2], "left"), add_up(client, numbers[2:], "right")
    )
    total = None
    if first is not None and others is not None:
        total = await add_up(client, [first, others], "main")
    return "no answer" if total is None else f"answer {total}"


async def add_up(client: openai.AsyncOpenAI, numbers: Sequence[int], caller: str) -> int | None:
    """Return the model's sum; None without an answer."""
    left = list(numbers)
    messages: list[Any] = [question(left)]
    results = 0
    for _ in range(TURNS_MAX):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], user=caller
        )
        said = answer.choices[0].message
        if not said.tool_calls:
            found = re.search(r"answer (\d+)$", said.content or "")
            return int(found[1]) if found else None
        messages.append(said)
        for call in said.tool_calls:
            total = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
            left = [total, *left[2:]]
            results += 1
        if results >= RESULTS_MAX and len(left) > 1:
            messages, results = [question(left)], 0
    return None


def question(numbers: Sequence[int]) -> dict[str, str]:
    """``n3 7 n2 5 n1 4``: the numbers, each with how many are left."""
    named = (f"n{len(numbers) - at} {number}" for at, number in enumerate(numbers))
    return {"role": "user", "content": " ".join(named)}


def calculator(a: int, b: int) -> int:
    """The tool."""
    return (a + b) % 100
