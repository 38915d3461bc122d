"""Two agents of OpenAI's Agents SDK that add numbers: one takes the question and hands over to one
that has a calculator. They know nothing of what trains them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool, handoff
from agents.exceptions import MaxTurnsExceeded, ModelBehaviorError
from agents.extensions.handoff_filters import remove_all_tools

TURNS_MAX = 12


@function_tool
def calculator(a: int, b: int) -> int:
    """Add two numbers, modulo 100."""
    return (a + b) % 100


ADDER = Agent(name="adder", instructions="Add the numbers.", tools=[calculator])
DESK = Agent(
    name="desk",
    instructions="Add the numbers.",
    handoffs=[handoff(ADDER, input_filter=remove_all_tools)],
)


async def run(base_url: str, api_key: str, row: Mapping[str, Any]) -> str:
    """The task scores their last answer."""
    return await answer(OpenAIProvider(base_url=base_url, api_key=api_key), row)


async def run_by_chat(base_url: str, api_key: str, row: Mapping[str, Any]) -> str:
    """The same by chat completions."""
    provider = OpenAIProvider(base_url=base_url, api_key=api_key, use_responses=False)
    return await answer(provider, row)


async def answer(provider: OpenAIProvider, row: Mapping[str, Any]) -> str:
    """Mistakes of the model (an unknown tool, no end) count as a wrong answer."""
    numbers = row["numbers"]
    question = " ".join(f"n{len(numbers) - index} {number}" for index, number in enumerate(numbers))
    config = RunConfig(model="policy", model_provider=provider, tracing_disabled=True)
    try:
        result = await Runner.run(DESK, question, max_turns=TURNS_MAX, run_config=config)
    except (MaxTurnsExceeded, ModelBehaviorError):
        return "no answer"
    return str(result.final_output)
