"""What the episodes of a kill round are: an agent with a tool and sub-agents, an environment on
servers, and tools; made so that a random policy takes several turns and earns something.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dora_pipe.producers.tasks.calculator import MODULUS, CalculatorTask, calculator
from dora_pipe.producers.tasks.port import Environment, Observation, Row, Tool, ToolCall, Turn

HERE: Final = "dora_pipe.bench.faults.episodes"

AGENT, SERVED, TOOLS = "agent", "served", "tools"
"""Names of the tasks of a round, in turns."""

STOP: Final = ("3", "5")
"""Turns end soon, also of a policy that knows nothing: a third of its words have one of these."""

TOLD: Final = "DORA_PIPE_FAULTS_TOLD"
"""Names the file that agents append to, a line for each answer."""

CONTEXT_TOKENS: Final = 256

WAIT_S: Final = 0.02
"""For an agent between two calls."""

STEP_S: Final = 0.25
"""For the environment: most workers that are killed have a step under way."""

TURNS: Final = 4

WALK: Final = "walk"
"""What the environment's answers are called in records."""


class Spoken(CalculatorTask):
    """The calculator's rows; the reward is the share of numbers among the words of the answer."""

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Between 0 and 1; see Task."""
        words = text.split()
        return sum(word.isdigit() for word in words) / max(1, len(words))


class Walk(Environment):
    """Answers each turn with a number that depends on all of them, `TURNS` times, and on where it
    began, by chance: no other answers alike."""

    async def reset(self, row: Row) -> str:  # type: ignore[override]
        """See Environment."""
        self._sum, self._left = secrets.randbelow(MODULUS), TURNS
        return f"{' '.join(map(str, row['numbers']))} |"

    async def respond(self, turn: Turn) -> Observation:
        """See Environment."""
        self._sum, self._left = (self._sum + len(turn.text)) % MODULUS, self._left - 1
        await asyncio.sleep(STEP_S)
        return Observation(text=f"result {self._sum}", done=self._left == 0, tool=WALK)


class Walks(Spoken):
    """An episode of several turns."""

    def environment(self, row: Row) -> Environment:
        """See Task."""
        return Walk()


class Asked(Spoken):
    """Prompts are messages, and the calculator is a tool: the model calls it, in most turns."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tools=True, **options)

    def tools(self, row: Row) -> Sequence[Tool]:
        """See Task."""
        return [calculator]


def read_turn(text: str) -> Turn:
    """As `task.tool_parser`: two turns of three call the calculator, whatever they say."""
    if len(text) % 3 == 0:
        return Turn(text=text.strip())
    arguments = {"a": len(text), "b": len(text.split())}
    return Turn(text=text.strip(), tool_calls=(ToolCall(name="calculator", arguments=arguments),))


def episode_tasks(urls: Sequence[str], token_file: str) -> list[dict[str, Any]]:
    """The tasks of a round as its configuration has them; one is played at the servers."""
    agent = {"agent": "dora_pipe.bench.faults.agent:run"}
    parser = f"{HERE}:read_turn"
    served = {"url": list(urls), "url_token_file": token_file, "processes": 2}
    return [
        {"name": AGENT, "kind": f"{HERE}:Asked", "tool_parser": parser, **agent},
        {"name": SERVED, "kind": f"{HERE}:Walks", "turns_max": TURNS, **served},
        {"name": TOOLS, "kind": f"{HERE}:Asked", "tool_parser": parser, "turns_max": TURNS},
    ]


def write_line(path: Path, line: str) -> None:
    """Append a line, whole, beside those of other processes."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def question(row: Mapping[str, Any]) -> str:
    """What an agent asks first."""
    return " ".join(map(str, row["numbers"]))
