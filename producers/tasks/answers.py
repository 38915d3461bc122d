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
    request: str, prompt: object, tools: Sequence[Tool], shown: Sequence[Mapping[str, Any]] = ()
) -> PromptReady:
    """Return a prompt of text or messages; `shown` replaces the schemas of `tools`. Raises
    NoAnswer."""
    if isinstance(prompt, str):
        if tools or shown:
            raise NoAnswer("the prompt of a row with tools is text, not messages")
        return PromptReady(request=request, text=prompt, episode=False)
    if not isinstance(prompt, Sequence):
        raise NoAnswer(f"the prompt is {type(prompt).__name__}, neither text nor messages")
    return PromptReady(
        request=request,
        text="",
        episode=False,
        messages=normal(prompt, "prompt"),
        tools=tuple(map(dict, shown)) or tuple(map(tool_schema, tools)),
    )


def observed(request: str, observation: object) -> EnvObserved:
    """Return a validated observation. Raises NoAnswer."""
    if not isinstance(observation, Observation):
        raise NoAnswer(f"the environment gave {type(observation).__name__}, not an Observation")
    for name in ("text", "tool"):
        if not isinstance(getattr(observation, name), str):
            raise NoAnswer(
                f"the observation's {name} is {type(getattr(observation, name)).__name__}"
            )
    return EnvObserved(
        request=request,
        text=observation.text,
        done=_truth("done", observation.done),
        tool=observation.tool,
        ok=_truth("ok", observation.ok),
        error=str(observation.error),
        messages=normal(observation.messages, "messages") if observation.messages else (),
    )


def _truth(name: str, value: object) -> bool:
    """Accepts numpy; text such as "false" is rejected."""
    if value is None or isinstance(value, str | bytes) or hasattr(value, "__len__"):
        raise NoAnswer(f"the observation's `{name}` is {type(value).__name__}, not true or false")
    return bool(value)


def scored(request: str, given: float | Reward | None) -> Rewarded:
    """Return a reward within `REWARD_MAX` whose numbers are all finite. Raises NoAnswer."""
    if given is None:
        raise NoAnswer("the only reward abstained (None)")
    reward = given if isinstance(given, Reward) else Reward(value=given)
    value = finite("the reward", reward.value)
    if abs(value) > REWARD_MAX:
        raise NoAnswer(f"the reward is {value:g}, beyond {REWARD_MAX:g}")
    parts = {str(name): finite(f"part `{name}`", part) for name, part in reward.parts.items()}
    raw = None if reward.raw is None else finite("the raw reward", reward.raw)
    answer = answer_text(reward.answer)
    return Rewarded(request=request, reward=value, raw=raw, parts=parts, answer=answer)


def agent_ended(request: str, result: object) -> AgentEnded:
    """Return the result of an agent. Raises NoAnswer."""
    if result is None or isinstance(result, str):
        if result and len(result) > AGENT_ANSWER_MAX:
            raise NoAnswer(f"the agent's answer has more than {AGENT_ANSWER_MAX} characters")
        return AgentEnded(request=request, text=result)
    return AgentEnded(request=request, rewarded=scored(request, result))  # type: ignore[arg-type]


def answer_text(answer: str) -> str:
    """Return an answer as logged. Raises NoAnswer."""
    if not isinstance(answer, str):
        raise NoAnswer(f"the reward's answer is {type(answer).__name__}, not a text")
    line = printable(" ".join(answer.split()))
    if len(line) <= ANSWER_CHARACTERS_MAX:
        return line
    end = sha256_hex(line.encode())[:16]
    return f"{line[: ANSWER_CHARACTERS_MAX - len(end)]}{end}"


def scored_together(request: str, given: object, count: int) -> GroupRewarded:
    """Return one reward per completion. Raises NoAnswer."""
    try:
        rewards = [scored(request, reward) for reward in in_order("score_group", given, count)]
    except (TypeError, ValueError) as error:
        raise NoAnswer(str(error)) from None
    return GroupRewarded(
        request=request,
        rewards=tuple(reward.reward for reward in rewards),
        parts=tuple(reward.parts for reward in rewards),
    )


def finite(what: str, value: object) -> float:
    """Return a finite float, also from numpy. Raises NoAnswer."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoAnswer(f"{what} is {number}")
    return number
