"""Built-in task `dataset`: rows of files, scored by named rewards.

The prompt is the text of a column, or its conversation without the last assistant message, which is
the default answer.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from msgspec.structs import replace

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import load_function
from dora_pipe.producers.data.conversations import TOOLS, prompt_of, unshown_columns
from dora_pipe.producers.data.prepare import open_rows
from dora_pipe.producers.data.spec import DataSpec, describe_sources
from dora_pipe.producers.rewards.registry import Rewards, single
from dora_pipe.producers.tasks.messages import (
    NoAnswer,
    normal,
    text_of,
    tool_name,
    tool_schema,
    tool_schemas,
)
from dora_pipe.producers.tasks.task import (
    Completion,
    DescribedTool,
    Prompt,
    Reward,
    Row,
    Split,
    Task,
    Tool,
)
from dora_pipe.schemas.identity import derive_seed

if TYPE_CHECKING:
    from dora_pipe.producers.adapters.mcp import McpTools

NOTED_ROWS: Final = 256

PROMPT: Final = "prompt"
ANSWER: Final = "answer"

_EXAMPLE: Final = 'for instance "rewards:score"'


class DatasetTask(Task):
    """Built-in task `dataset`; imports the reward's module on first use."""

    played = False
    """An agent makes its own prompts."""

    def __init__(
        self,
        *,
        data: str | Sequence[str] = "",
        eval_data: str | Sequence[str] = "",
        split: str = "",
        eval_split: str = "",
        eval_share: float = 0.0,
        filter: str = "",
        columns: Mapping[str, str] | None = None,
        chat: bool = False,
        system_prompt: str = "",
        tools: Sequence[str] = (),
        mcp: McpTools | None = None,
        reward: str | Rewards = "",
    ) -> None:
        """Parameters are keys of [task]. Raises ConfigError."""
        train, evaluation = _sources(data), _sources(eval_data)
        if not train:
            raise ConfigError("task.data: `dataset` needs a file", hint="or a glob, or hf:NAME")
        if not reward:
            raise ConfigError("task.reward: `dataset` needs a reward function", hint=_EXAMPLE)
        if eval_share and (evaluation or eval_split):
            raise ConfigError("task.eval_share: excludes task.eval_data and task.eval_split")
        common = DataSpec(
            sources=train,
            split=split,
            columns=dict(columns or {}),
            filter=filter,
            prompt=PROMPT,
            held_out=eval_share,
        )
        self._specs: dict[Split, DataSpec] = {
            "train": replace(common, part="train") if eval_share else common
        }
        if eval_share:
            self._specs["eval"] = replace(common, part="eval")
        elif evaluation or eval_split:
            self._specs["eval"] = replace(common, sources=evaluation or train, split=eval_split)
        self._open: dict[Split, Sequence[Row]] = {}
        self._chat, self._system = chat or bool(system_prompt), system_prompt
        self._tool_names, self._tools = tuple(tools), tuple[Tool, ...]()
        self._mcp = mcp
        self._rewards = reward if isinstance(reward, Rewards) else single(reward)

    def rows(self, split: Split) -> Sequence[Row]:
        """Raises TaskError with the first unreadable row."""
        if split not in self._open:
            spec = self._specs.get(split)
            self._open[split] = [] if spec is None else open_rows(spec)
        return self._open[split]

    def check(self) -> None:
        """Check prompt, tools and answer of the first row. Raises TaskError."""
        first = self.rows("train")[0]
        try:
            if not isinstance(prompt := self.prompt(first), str):
                normal(prompt, "messages")
            elif self._rewards.wants_reasoning and not self.played:
                raise TaskError(
                    f"{self._where}: task.reward looks at the reasoning, which prompts of"
                    " text do not separate from the answer",
                    hint="set task.chat = true",
                )
            names = [tool_schema(tool)["function"]["name"] for tool in self.tools(first)]
        except NoAnswer as error:
            raise TaskError(f"{self._where}: the first row's prompt: {error}") from None
        if twice := next((name for name in names if names.count(name) > 1), ""):
            hint = "a server's tools with its `name` in front: task.mcp = [{name = ...}]"
            raise TaskError(f"{self._where}: two tools are called `{twice}`", hint=hint)
        if self._rewards.wants_answer and ANSWER not in self._answered(first):
            columns = ", ".join(f"`{name}`" for name in first)
            raise TaskError(
                f"{self._where}: the first row has no `answer`, which task.reward compares with",
                hint=f'task.columns = {{answer = "..."}}; it has {columns}',
            )
        try:
            self._rewards.check_answer(self._answered(first).get(ANSWER))
        except TaskError as error:
            raise TaskError(f"{self._where}: the first row: {error.message}") from None

    def prompt(self, row: Row) -> Prompt:
        return self._parts(row)[0]

    def tools(self, row: Row) -> Sequence[Tool]:
        if len(self._tools) < len(self._tool_names):
            self._tools = tuple(
                load_function("task.tools", name, TaskError) for name in self._tool_names
            )
        functions = (*self._tools, *(self._mcp.tools() if self._mcp else ()))
        names = [schema["function"]["name"] for schema in self.shown_tools(row)]
        if not functions or not names:
            return functions
        by_name = {tool_name(tool): tool for tool in functions}
        if unknown := next((name for name in names if name not in by_name), ""):
            raise TaskError(
                f"the row's tool `{unknown}` has no function; known: {', '.join(by_name)}",
                hint='task.columns = {tools = ""} leaves the column out',
            )
        return tuple(by_name[name] for name in names)

    def shown_tools(self, row: Row) -> Sequence[Mapping[str, Any]]:
        """Return the row's tools. Raises TaskError."""
        tools = row.get(TOOLS)
        if not tools or isinstance(self.prompt(row), str):
            return ()
        try:
            return tool_schemas(tools)
        except NoAnswer as error:
            raise TaskError(f"the column `{TOOLS}`: {error}") from None

    def single_turn(self) -> bool:
        return not self._tool_names and self._mcp is None

    def reward(
        self, row: Row, text: str, turns: Sequence[str]
    ) -> float | Reward | Awaitable[float | Reward]:
        return self.score(row, Completion(text=text, turns=turns))

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        return self._rewards.score(self._answered(row), completion)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        row = self._answered(row)
        return self._rewards.score_group(row, completions)

    def scores_groups(self) -> bool:
        return self._rewards.scores_groups

    def demonstrations(self, seed: int, count: int) -> Sequence[tuple[str, str]] | Sequence[Row]:
        """Return prompts and answers, or conversations, shuffled by `seed` and repeated. Raises
        TaskError if a row has no answer."""
        rows = self.rows("train")
        chance = random.Random(derive_seed("dataset", "demonstrations", seed))
        indices = list(_drawn(chance, len(rows), count))
        if not indices:
            raise TaskError(f"{self._where}: has no rows")
        if isinstance(self.prompt(rows[indices[0]]), str):
            return [self._pair(index, rows[index]) for index in indices]
        return [self._conversation(index, rows[index]) for index in indices]

    def reward_sources(self) -> Sequence[Any]:
        servers = (f"{name} {version}" for name, version in self.packages().items())
        own = (tool for tool in self.tools({}) if not isinstance(tool, DescribedTool))
        return (*self._rewards.sources(), type(self), *own, *servers)

    def notes(self) -> Sequence[str]:
        """Return notes on columns that are not shown."""
        rows, used = self.rows("train")[:NOTED_ROWS], (PROMPT, ANSWER)
        chat = bool(rows) and not isinstance(self.prompt(rows[0]), str)
        notes = unshown_columns(rows, used, tools=chat)
        return [f"{self._where}: {note}" for note in notes]

    def packages(self) -> Mapping[str, str]:
        return self._mcp.packages() if self._mcp else {}

    @property
    def _where(self) -> str:
        return describe_sources(self._specs["train"].sources)

    def _parts(self, row: Row) -> tuple[Prompt, Mapping[str, Any] | None]:
        return prompt_of(row[PROMPT], chat=self._chat, system=self._system)

    def _answered(self, row: Row) -> Row:
        """Add the conversation's answer, if the row has none."""
        if row.get(ANSWER) is not None:
            return row
        answer = self._parts(row)[1]
        text = text_of(answer.get("content")) if answer else ""
        if answer is None or (not text and answer.get("tool_calls")):
            return row  # calls alone have no text
        return {**row, ANSWER: text}

    def _pair(self, index: int, row: Row) -> tuple[str, str]:
        prompt, answer = self.prompt(row), row.get(ANSWER)
        if isinstance(prompt, str) and isinstance(answer, str):
            return prompt, answer
        column = ANSWER if isinstance(prompt, str) else PROMPT
        raise self._no_demonstration(index, column)

    def _conversation(self, index: int, row: Row) -> Row:
        asked, answer_message = self._parts(row)
        if answer_message is None and isinstance(answer := row.get(ANSWER), str):
            answer_message = {"role": "assistant", "content": answer}
        if answer_message is None:
            raise self._no_demonstration(index, ANSWER)
        if isinstance(asked, str):
            raise self._no_demonstration(index, PROMPT, "messages")
        shown = self.shown_tools(row) or self.tools(row)
        tools = {"tools": shown} if shown else {}
        return {"messages": [*asked, answer_message], **tools}

    def _no_demonstration(self, index: int, column: str, what: str = "text") -> TaskError:
        return TaskError(
            f"{self._where}: row {index} has no {what} in `{column}`, so it is not a demonstration"
        )


def _sources(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(source for source in ([given] if isinstance(given, str) else given) if source)


def _drawn(chance: random.Random, rows: int, count: int) -> Iterator[int]:
    """Yield `count` indices; each row once before any repeats."""
    remaining = count if rows else 0
    while remaining > 0:
        yield from chance.sample(range(rows), rows)[:remaining]
        remaining -= rows
