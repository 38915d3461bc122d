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
    first, second = await asyncio.gather(
        add_up(client, numbers[:2], "left"), add_up(client, numbers[2:], "right")
    )
    total = None
    if first is not None and second is not None:
        total = await add_up(client, [first, second], "main")
    return "no answer" if total is None else f"answer {total}"


async def add_up(client: openai.AsyncOpenAI, numbers: Sequence[int], caller: str) -> int | None:
    """Return the model's sum; None without an answer."""
    remaining = list(numbers)
    messages: list[Any] = [question(remaining)]
    results = 0
    for _ in range(TURNS_MAX):
        answer = await client.chat.completions.create(
            model="policy", messages=messages, tools=[TOOL], user=caller
        )
        reply = answer.choices[0].message
        if not reply.tool_calls:
            match = re.search(r"answer (\d+)$", reply.content or "")
            return int(match[1]) if match else None
        messages.append(reply)
        for call in reply.tool_calls:
            total = calculator(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
            remaining = [total, *remaining[2:]]
            results += 1
        if results >= RESULTS_MAX and len(remaining) > 1:
            messages, results = [question(remaining)], 0
    return None


def question(numbers: Sequence[int]) -> dict[str, str]:
    """``n3 7 n2 5 n1 4``: the numbers, each with how many are left."""
    named = (f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers))
    return {"role": "user", "content": " ".join(named)}


def calculator(a: int, b: int) -> int:
    return (a + b) % 100
