"""What the task pool is asked and what it answers; decides nothing.

A request has at most one call at a time. Its life is ``PromptCall``, for an episode some
``EnvStep``, then ``RewardCall`` (which ends the episode) or ``Forget``. Every call gets exactly
one event, `Forget` none:

    PromptCall -> PromptReady | TaskFailed | EpisodeLost
    EnvStep    -> EnvObserved | TaskFailed | EpisodeLost
    RewardCall -> Rewarded    | TaskFailed | EpisodeLost (only where an episode was to score)

An episode that lies idle when its process dies gets an `EpisodeLost` too. `TaskFailed` is the
fault of that call (it raised, hung or killed its process): the trajectory is invalid, and
repeating would not help. `EpisodeLost` is the fault of another: the request may start again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dora_pipe.producers.tasks.port import Split


class PromptCall(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for a row's prompt; starts an episode where the row has an environment.

    Example: ``PromptCall(request="g0000000042-003", split="train", index=17)``.
    """

    request: str
    split: Split
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """Hand a model turn to the request's episode."""

    request: str
    text: str


class RewardCall(msgspec.Struct, frozen=True, kw_only=True):
    """Score a finished trajectory. `text` is its last model turn, `turns` all segments but the
    prompt, in order. Goes to the request's episode where there is one, and ends it."""

    request: str
    split: Split
    index: int
    text: str
    turns: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forget:
    """Drop the request's call and episode without an event; unknown requests are ignored."""

    request: str


TaskCall = PromptCall | EnvStep | RewardCall


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReady:
    """The prompt, as text. With `episode`, finished turns go to `EnvStep`."""

    request: str
    text: str
    episode: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvObserved:
    """What the environment answered (see `Observation`)."""

    request: str
    text: str
    done: bool
    tool: str
    ok: bool


class Rewarded(msgspec.Struct, frozen=True, kw_only=True):
    """A valid reward; all numbers are finite."""

    request: str
    reward: float
    raw: float | None
    parts: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskFailed:
    """The call raised, hung, killed its process or gave something that is no answer.

    Example: ``TaskFailed(request=..., error="TimedOut", message="timed out after 10 s")``.
    """

    request: str
    error: str
    """Class of what was raised, or `TimedOut`, `ProcessDied`, `NoAnswer`."""
    message: str
    """One line of at most `MESSAGE_CHARS_MAX` characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeLost:
    """The process that held the request's episode is gone, for no fault of the request."""

    request: str
    message: str


TaskEvent = PromptReady | EnvObserved | Rewarded | TaskFailed | EpisodeLost

MESSAGE_CHARS_MAX = 300
"""Errors travel into every trajectory's record: one line, cut here."""


def one_line(text: str) -> str:
    """`text` on one line, cut at `MESSAGE_CHARS_MAX` characters."""
    line = " ".join(text.encode("utf-8", "replace").decode().split())
    if len(line) <= MESSAGE_CHARS_MAX:
        return line
    return line[: MESSAGE_CHARS_MAX - 3] + "..."
