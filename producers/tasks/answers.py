"""Validation of values returned by users' code."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dora_pipe.core.errors import printable
from dora_pipe.producers.tasks.calls import (
    AgentEnded,
    EnvObserved,
    GroupRewarded,
    PromptReady,
    Rewarded,
)
from dora_pipe.producers.tasks.messages import NoAnswer, normal, tool_schema
from dora_pipe.producers.tasks.task import ANSWER_CHARACTERS_MAX, Observation, Reward, Tool
from dora_pipe.producers.tasks.values import in_order
from dora_pipe.schemas.wire import REWARD_MAX, sha256_hex

AGENT_ANSWER_MAX: Final = 1 << 20
"""Most characters of an agent's answer."""


def prompted(
    request: str, said: object, tools: Sequence[Tool], shown: Sequence[Mapping[str, Any]] = ()
) -> PromptReady:
    """Return a prompt of text or messages; `shown` replaces the schemas of `tools`. Raises
    NoAnswer."""
    if isinstance(said, str):
        if tools or shown:
            raise NoAnswer("the prompt of a row with tools is text, not messages")
        return PromptReady(request=request, text=said, episode=False)
    if not isinstance(said, Sequence):
        raise NoAnswer(f"the prompt is {type(said).__name__}, neither text nor messages")
    return PromptReady(
        request=request,
        text="",
        episode=False,
        messages=normal(said, "prompt"),
        tools=tuple(map(dict, shown)) or tuple(map(tool_schema, tools)),
    )


def observed(request: str, seen: object) -> EnvObserved:
    """Return a validated observation. Raises NoAnswer."""
    if not isinstance(seen, Observation):
        raise NoAnswer(f"the environment gave {type(seen).__name__}, not an Observation")
    for name in ("text", "tool"):
        if not isinstance(getattr(seen, name), str):
            raise NoAnswer(f"the observation's {name} is {type(getattr(seen, name)).__name__}")
    return EnvObserved(
        request=request,
        text=seen.text,
        done=_truth("done", seen.done),
        tool=seen.tool,
        ok=_truth("ok", seen.ok),
        error=str(seen.error),
        messages=normal(seen.messages, "messages") if seen.messages else (),
    )


def _truth(name: str, value: object) -> bool:
    """Accepts numpy; text such as "false" is rejected."""
    if value is None or isinstance(value, str | bytes) or hasattr(value, "__len__"):
        raise NoAnswer(f"the observation's `{name}` is {type(value).__name__}, not true or false")
    return bool(value)


def scored(request: str, found: float | Reward | None) -> Rewarded:
    """Return a reward within `REWARD_MAX` whose numbers are all finite. Raises NoAnswer."""
    if found is None:
        raise NoAnswer("the only reward abstained (None)")
    reward = found if isinstance(found, Reward) else Reward(value=found)
    value = finite("the reward", reward.value)
    if abs(value) > REWARD_MAX:
        raise NoAnswer(f"the reward is {value:g}, beyond {REWARD_MAX:g}")
    parts = {str(name): finite(f"part `{name}`", part) for name, part in reward.parts.items()}
    raw = None if reward.raw is None else finite("the raw reward", reward.raw)
    answer = answer_text(reward.answer)
    return Rewarded(request=request, reward=value, raw=raw, parts=parts, answer=answer)


def agent_ended(request: str, found: object) -> AgentEnded:
    """Return the result of an agent. Raises NoAnswer."""
    if found is None or isinstance(found, str):
        if found and len(found) > AGENT_ANSWER_MAX:
            raise NoAnswer(f"the agent's answer has more than {AGENT_ANSWER_MAX} characters")
        return AgentEnded(request=request, text=found)
    return AgentEnded(request=request, rewarded=scored(request, found))  # type: ignore[arg-type]


def answer_text(answer: str) -> str:
    """Return an answer as logged. Raises NoAnswer."""
    if not isinstance(answer, str):
        raise NoAnswer(f"the reward's answer is {type(answer).__name__}, not a text")
    line = printable(" ".join(answer.split()))
    if len(line) <= ANSWER_CHARACTERS_MAX:
        return line
    end = sha256_hex(line.encode())[:16]
    return f"{line[: ANSWER_CHARACTERS_MAX - len(end)]}{end}"


def scored_together(request: str, found: object, count: int) -> GroupRewarded:
    """Return one reward per completion. Raises NoAnswer."""
    try:
        rewards = [scored(request, one) for one in in_order("score_group", found, count)]
    except (TypeError, ValueError) as error:
        raise NoAnswer(str(error)) from None
    return GroupRewarded(
        request=request,
        rewards=tuple(one.reward for one in rewards),
        parts=tuple(one.parts for one in rewards),
    )


def finite(what: str, value: object) -> float:
    """Return a finite float, also from numpy. Raises NoAnswer."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoAnswer(f"{what} is {number}")
    return number
