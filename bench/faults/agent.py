"""The agent of a kill round, a script of the package `openai`: two sub-agents at the same time,
each with a tool and a compaction, and then one that sums up. It knows nothing of the training.

It writes down what it was told, a line for each answer, for who judges the round.
"""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import openai

from dora_pipe.bench.faults.episodes import TOLD, WAIT_S, question, write_line
from dora_pipe.producers.tasks.calculator import calculator
from dora_pipe.producers.tasks.messages import tool_schema

TURNS: Final = 3
COMPACTED_AT: Final = 2
"""So many turns a conversation has before it begins anew with what was said last."""


async def run(base_url: str, api_key: str, row: Mapping[str, Any]) -> str:
    """What the last call said."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        asks = _Asks(client, base_url.split("/")[-2])
        first = question(row)
        found = await asyncio.gather(
            _talk(asks, "left", first), _talk(asks, "right", f"n1 {first}")
        )
        said = await asks.ask([{"role": "user", "content": " ".join(found)}], "main")
        return said.content or ""


class _Asks:
    """The calls of one start of the agent."""

    def __init__(self, client: openai.AsyncOpenAI, session: str) -> None:
        self._client, self._session, self._start = client, session, uuid.uuid4().hex

    async def ask(self, messages: list[Any], caller: str) -> Any:
        """A call, and a line for what it was answered."""
        answer = await self._client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=[tool_schema(calculator)],  # type: ignore[list-item]
            user=caller,
            max_tokens=6,
            extra_body={"return_token_ids": True},
        )
        choice: Any = answer.choices[0]
        prompt: Any = answer
        told = [self._session, self._start, prompt.prompt_token_ids, choice.token_ids]
        write_line(Path(os.environ[TOLD]), json.dumps(told))
        return choice.message


async def _talk(asks: _Asks, caller: str, first: str) -> str:
    messages: list[Any] = [{"role": "user", "content": first}]
    said: Any = None
    for turn in range(TURNS):
        await asyncio.sleep(WAIT_S)
        said = await asks.ask(messages, caller)
        messages += [said, *_results(said)]
        if turn + 1 == COMPACTED_AT:
            messages = [{"role": "user", "content": f"{first} {said.content or ''}"}]
    return said.content or ""


def _results(said: Any) -> list[Any]:
    """What the tool gives, or a word of the user's where none was called."""
    if not said.tool_calls:
        return [{"role": "user", "content": "call"}]
    return [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": str(calculator(**json.loads(call.function.arguments))),
        }
        for call in said.tool_calls
    ]
