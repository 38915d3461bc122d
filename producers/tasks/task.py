"""Interface of a task. Users subclass `Task`.

A task runs in its own process. An exception, timeout or crash makes the trajectory invalid; it
never counts as a reward of 0. Texts contain no special tokens.

Example::

    class Square(Task):
        def rows(self, split): return [{"prompt": f"{n}*{n}=", "answer": str(n * n)} for n in ...]
        def prompt(self, row): return row["prompt"]
        def reward(self, row, text, turns): return float(text.strip() == row["answer"])
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import msgspec

Row = Mapping[str, Any]
"""Row of a data set, as plain JSON values."""

Message = Mapping[str, Any]
"""Chat message in OpenAI's format, with tool arguments as objects and optional
`reasoning_content`."""

Prompt = str | Sequence[Message]
"""Text, or messages for the chat template."""

Tool = Callable[..., Any]
"""Python function that the model may call; its schema comes from signature and docstring."""

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """Score with its parts. A plain number equals `Reward(value=number)`."""

    value: float
    """At most 1e6 in absolute value."""
    raw: float | None = None
    """Value before shaping."""
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""
    """Normalized answer; equal answers are one vote of `maj@k`. White space becomes one blank, and
    long text ends with a digest."""


ANSWER_CHARACTERS_MAX = 200


class Retry(Exception):
    """Raised by users' code for an external failure; the call is repeated up to `RETRIES_MAX`
    times."""


RETRIES_MAX: Final = 3


class ToolFailed(Exception):
    """Raised by a tool; the model sees only this message."""


class DescribedTool:
    """Tool with a JSON Schema; its service validates arguments."""

    def __init__(
        self,
        *,
        name: str,
        about: str,
        parameters: Mapping[str, Any],
        call: Callable[[Mapping[str, Any]], Any],
        close: Callable[[], None] | None = None,
    ) -> None:
        """`call` receives the arguments."""
        self.name, self.about, self.parameters = name, about, parameters
        self._call, self._close = call, close

    def __call__(self, /, **arguments: Any) -> Any:
        return self._call(arguments)

    def close(self) -> None:
        if self._close is not None:
            self._close()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tool call written by the model."""

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str = ""
    """Reason why the call is invalid; `raw` is its text."""
    raw: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Model turn as parsed by the chat template."""

    text: str
    """Without special tokens, reasoning and calls."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        invalid = [call.raw for call in self.tool_calls if call.error]
        content = "\n".join([self.text, *invalid]).strip("\n")
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        calls = [call for call in self.tool_calls if not call.error]
        if calls:
            message["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in calls
            ]
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Answer of an environment. Messages require prompts of messages."""

    text: str = ""
    done: bool
    messages: Sequence[Message] = ()
    tool: str = ""
    """Empty for the environment itself."""
    ok: bool = True
    error: str = ""
    """Class, location and message of an exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Finished trajectory as input of a reward."""

    text: str
    """Last model turn, without special tokens and reasoning."""
    turns: Sequence[str] = ()
    """Texts of all segments after the prompt: model turn, observation, model turn, ..."""
    messages: Sequence[Message] = ()
    """Whole conversation, if prompts are messages; in `score_group` of single turns only."""
    reasoning: str = ""
    """Reasoning of the last turn; if it never ends, `text` is empty."""

    @property
    def written(self) -> str:
        """Last turn as written, with reasoning in `<think>`."""
        turn = self.turns[-1] if self.turns else self.text
        begun = "<think>" not in turn and (self.reasoning or "</think>" in turn)
        return f"<think>{turn}" if begun else turn


class Environment:
    """Episode: `reset`, then `step` or `respond` per model turn, then `close`. Methods may be
    `async`."""

    def reset(self, row: Row) -> Prompt:
        """Return the first prompt."""
        raise NotImplementedError

    def step(self, text: str) -> Observation:
        """Answer the model turn `text`."""
        raise NotImplementedError

    def respond(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answer a turn with tool calls; by default `step`."""
        return self.step(turn.text)

    def reward(self, text: str, turns: Sequence[str]) -> float | Reward | None:
        """Score the episode; None uses the task's reward."""
        return None

    def close(self) -> None:
        """Release resources. Not called if the process is killed."""


class Task:
    """Data, prompts, environments and rewards of a training task."""

    replayable: bool = False
    """Whether a fresh environment returns exactly the same answers to the same turns in any
    process: without clock, stateful services, or randomness beyond the row. Then episodes survive a
    loss by replay. Also set by `task.replayable`."""

    def rows(self, split: Split) -> Sequence[Row]:
        """Return all rows; their digest must be equal in every process."""
        raise NotImplementedError

    def check(self) -> None:
        """Check once per process, before any call; an exception stops the run."""

    def prompt(self, row: Row) -> Prompt:
        """Return the prompt of a row."""
        raise NotImplementedError

    def tools(self, row: Row) -> Sequence[Tool]:
        """Return functions that the model may call, if prompts are messages. A row with tools and
        no environment is an episode that ends with a turn without calls."""
        return ()

    def shown_tools(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """Return schemas shown in place of those of `tools`; without functions, calls are not
        executed."""
        return ()

    def environment(self, row: Row) -> Environment | None:
        """Return an environment; None for a single turn."""
        return None

    def single_turn(self) -> bool:
        """Return whether no row is an episode; by default if neither `environment` nor `tools` is
        overridden."""
        kind = type(self)
        return kind.environment is Task.environment and kind.tools is Task.tools

    def reward(
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float | Reward | Awaitable[float | Reward]:
        """Score a trajectory: `text` is the last model turn, `turns` all segments after the
        prompt."""
        if self.scores_groups():
            return 0.0
        raise NotImplementedError

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        """Score a completion; by default `reward`."""
        return self.reward(row, completion.text, completion.turns)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[float | Reward] | Awaitable[Sequence[float | Reward]]:
        """Return one number per completion, in order, which is added to its own reward.

        Called with the valid trajectories of an ended group. `reward` is then optional.
        """
        raise NotImplementedError

    def scores_groups(self) -> bool:
        """Return whether `score_group` is used; by default if overridden."""
        return type(self).score_group is not Task.score_group

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """Return examples for supervised warm-up.

        Either (prompt, answer) pairs without end-of-sequence token, or conversations for `sft
        --data`: ``{"messages": [...]}``, with `tools` if needed.
        """
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """Return notes for the start of a run."""
        return ()

    def reward_sources(self) -> Sequence[Any]:
        """Return classes and functions whose modules are digested; text is digested itself."""
        return (type(self),)

    def packages(self) -> Mapping[str, str]:
        """Return third-party packages and servers with versions and digests."""
        return {}
