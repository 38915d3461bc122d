"""The port of a task: rows of data, an environment for several turns, a reward; decides nothing.

A `Task` runs in its own process (see `pool`), away from the engine: what raises, hangs or dies
there makes an invalid trajectory with its error, never a reward of 0. Users write this class.

Texts of the model are decoded without special tokens, so a turn that ended at the tokenizer's
end-of-sequence token does not show it; what an environment says is encoded without them.

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
"""One row of a data set: plain JSON values."""

Message = Mapping[str, Any]
"""One chat message as plain JSON: `role`, `content` (text, or parts of text), and where they belong
`reasoning_content`, `tool_calls`, `tool_call_id`, `name`; as chat templates and OpenAI's API have
them, but arguments of tool calls are objects, not JSON in a string."""

Prompt = str | Sequence[Message]
"""Text for the tokenizer, or messages for the model's chat template."""

Tool = Callable[..., Any]
"""A Python function that the model may call; its schema is made of signature and docstring."""

Split = Literal["train", "eval"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score with its parts. A plain number is taken as `Reward(value=number)`.

    Example: ``Reward(value=0.9, raw=1.0, parts={"exact": 1.0, "length": -0.1})``.
    """

    value: float
    """Within `dora_pipe.schemas.wire.REWARD_MAX`: 1e6, positive or negative."""
    raw: float | None = None
    """Before shaping, where the task shapes."""
    parts: Mapping[str, float] = field(default_factory=dict)
    answer: str = ""
    """What was read as the answer, in a form that equal answers share: they are one vote of
    `maj@k`. White space is made one blank; of a text above `ANSWER_CHARACTERS_MAX` characters the
    end is a digest."""


ANSWER_CHARACTERS_MAX = 200
"""Of the answer of a reward, as it is logged."""


class Retry(Exception):
    """Raised by users' code where something outside failed: a judge that does not answer, a sandbox
    that is full. The call is made again, later; see `RETRIES_MAX`."""


RETRIES_MAX: Final = 3
"""Further tries at a call that raised `Retry`."""


class ToolFailed(Exception):
    """Raised by a tool whose failure the model is told of in these words alone."""


class DescribedTool:
    """A tool that says itself what it takes, as JSON Schema: no Python signature is behind it, and
    whoever it calls checks its arguments."""

    def __init__(
        self,
        *,
        name: str,
        about: str,
        parameters: Mapping[str, Any],
        call: Callable[[Mapping[str, Any]], Any],
        close: Callable[[], None] | None = None,
    ) -> None:
        """`call` gets the arguments of a call; `close` is called when the episode ends."""
        self.name, self.about, self.parameters = name, about, parameters
        self._call, self._close = call, close

    def __call__(self, /, **arguments: Any) -> Any:
        """What the model is told, as of any tool."""
        return self._call(arguments)

    def close(self) -> None:
        """The episode is over."""
        if self._close is not None:
            self._close()


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A call that the model wrote.

    Example: ``ToolCall(name="add", arguments={"a": 1, "b": 2}, id="call-0")``.
    """

    name: str
    arguments: dict[str, Any] = {}
    id: str = ""
    error: str = ""
    """Why it is no call that can be made (no JSON, no name); then `raw` says what was written."""
    raw: str = ""


class Turn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the model said in one turn, as its chat template's parser reads it.

    Example: ``Turn(text="It is 3.", reasoning="1 and 2 make 3.")``. Of a prompt that was text it is
    the text alone.
    """

    text: str
    """Without special tokens, reasoning and calls."""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def message(self) -> dict[str, Any]:
        """As an assistant's message. Calls that cannot be made stand in the text as written."""
        content = "\n".join([self.text, *(one.raw for one in self.tool_calls if one.error)]).strip(
            "\n"
        )
        said: dict[str, Any] = {"role": "assistant", "content": content}
        if self.reasoning:
            said["reasoning_content"] = self.reasoning
        calls = [one for one in self.tool_calls if not one.error]
        if calls:
            said["tool_calls"] = [
                {
                    "type": "function",
                    "id": one.id,
                    "function": {"name": one.name, "arguments": one.arguments},
                }
                for one in calls
            ]
        return said


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What an environment answers to a model's turn: text or messages, and whether it is done.

    Example: ``Observation(text="result 42", done=False, tool="calculator")``. Messages (of tools,
    of a user) are for prompts of messages: the chat template says what stands around them.
    """

    text: str = ""
    done: bool
    messages: Sequence[Message] = ()
    tool: str = ""
    """Name of the tool that answered; empty for the environment itself."""
    ok: bool = True
    error: str = ""
    """Class, place and message of what a tool's function raised; the console shows the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A finished trajectory, for who scores it."""

    text: str
    """The last turn of the model, without special tokens; of messages also without reasoning."""
    turns: Sequence[str] = ()
    """Texts of all segments but the prompt: model turn, observation, model turn, ... in order."""
    messages: Sequence[Message] = ()
    """The whole conversation, the prompt and the last turn included, where prompts are messages;
    for `score_group` only of a single turn."""
    reasoning: str = ""
    """The thoughts of the last turn, where prompts are messages. Of thoughts that never end, `text`
    is empty."""

    @property
    def written(self) -> str:
        """The last turn as it was written: thoughts in `<think>`, which the prompt may have begun,
        calls and text."""
        turn = self.turns[-1] if self.turns else self.text
        begun = "<think>" not in turn and (self.reasoning or "</think>" in turn)
        return f"<think>{turn}" if begun else turn


class Environment:
    """One episode: `reset` once, then `step` or `respond` after every turn of the model, then
    `close`. Methods that the task's process calls may be `async`."""

    def reset(self, row: Row) -> Prompt:
        """The first prompt of the episode."""
        raise NotImplementedError

    def step(self, text: str) -> Observation:
        """Answer the model's turn `text`."""
        raise NotImplementedError

    def respond(self, turn: Turn) -> Observation | Awaitable[Observation]:
        """Answer the model's turn with its reasoning and tool calls; by default `step` of its
        text."""
        return self.step(turn.text)

    def reward(self, text: str, turns: Sequence[str]) -> float | Reward | None:
        """Score the finished episode from its state; None (the default) leaves it to the task."""
        return None

    def close(self) -> None:
        """Let go of what the episode holds. Not called when its process is killed."""


class Task:
    """Data, prompt, environment and reward of what is learnt."""

    replayable: bool = False
    """Whether a fresh environment of a row (or its tools) that is told the same turns of the model
    answers them with the very same words, in whatever process: nothing of it is drawn, or all from
    the row; it asks no clock, and no service that remembers. Then an episode survives its worker
    and its process: it goes on where it was, after its turns were told again. `task.replayable`
    says so, too."""

    def rows(self, split: Split) -> Sequence[Row]:
        """All rows of a split; the same ones in every process (their digest is checked)."""
        raise NotImplementedError

    def check(self) -> None:
        """Asked once in every process, before any call: whatever is raised here stops the start
        of a run with one line, where it would fail every trajectory later. By default nothing."""

    def prompt(self, row: Row) -> Prompt:
        """The prompt of a row: text for the tokenizer, or messages for the chat template."""
        raise NotImplementedError

    def tools(self, row: Row) -> Sequence[Tool]:
        """Functions that the model may call, where prompts are messages. A row that has some and no
        environment of its own is an episode: they are called, and their results told, until the
        model calls none."""
        return ()

    def shown_tools(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """Schemas that the model is shown in place of those of `tools`. Where a row has these alone
        and no functions, its calls are made by nobody: rewards see them in `messages`."""
        return ()

    def environment(self, row: Row) -> Environment | None:
        """An environment for several turns; None (the default) for a single turn."""
        return None

    def single_turn(self) -> bool:
        """Whether no row is an episode: then running requests may move to other workers. By default
        it is so where neither `environment` nor `tools` is written anew."""
        kind = type(self)
        return kind.environment is Task.environment and kind.tools is Task.tools

    def reward(
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float | Reward | Awaitable[float | Reward]:
        """Score a finished trajectory: `text` is the last model turn, `turns` every segment's text.

        `turns` has no prompt in it: model turn, observation, model turn, ... in order.
        """
        if self.scores_groups():
            return 0.0
        raise NotImplementedError

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        """As `reward`, with all that is known of it; by default it asks `reward`."""
        return self.reward(row, completion.text, completion.turns)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[float | Reward] | Awaitable[Sequence[float | Reward]]:
        """What each of a row's answers deserves beside the others: a number per completion, in
        order, that is added to its own reward. Asked when all siblings of a group have ended, of
        those with a valid reward of their own; a task with `score_group` needs no `reward`."""
        raise NotImplementedError

    def scores_groups(self) -> bool:
        """Whether `score_group` is to be asked; by default where it is written anew."""
        return type(self).score_group is not Task.score_group

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """What a supervised warm start is made of; only where the task can make it.

        (prompt, answer) pairs: the end-of-sequence token is not part of an answer; who trains on it
        adds it. Or conversations, as `sft --data` takes them: ``{"messages": [...]}``, and `tools`
        (functions, or their schemas) where a run has some.
        """
        raise NotImplementedError

    def notes(self) -> Sequence[str]:
        """Sentences about the data that a user should read when a run starts."""
        return ()

    def reward_sources(self) -> Sequence[Any]:
        """Classes and functions whose modules decide the reward; their source is digested. A text
        is digested itself: options, versions of libraries."""
        return (type(self),)

    def packages(self) -> Mapping[str, str]:
        """Which packages and servers of others it plays with, each with its version and a digest of
        its source; they stand in `worker joined`. By default none."""
        return {}
