"""Runs the model's tool calls. Errors of the model are returned to it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import msgspec

from dora_pipe.core.system.own_code import nearest, traceback_of, with_place
from dora_pipe.producers.tasks.calls import message_line
from dora_pipe.producers.tasks.execution import call_in_thread
from dora_pipe.producers.tasks.messages import arguments_of, tool_name
from dora_pipe.producers.tasks.task import (
    DescribedTool,
    Environment,
    Observation,
    Prompt,
    Retry,
    Row,
    Task,
    Tool,
    ToolCall,
    ToolFailed,
    Turn,
)
from dora_pipe.producers.tasks.values import NoValue, as_text

CALLS_MAX: Final = 32

LOGGED_MAX: Final = 20
"""Most kinds of logged errors."""

_logged: set[tuple[str, str]] = set()
"""Tools and types."""

TOOL_LIMIT_S: ContextVar[float] = ContextVar("tool limit", default=10.0)
"""`task.environment_timeout_s` of this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """Result of a call as shown to the model."""

    text: str
    ok: bool


class ToolEnvironment(Environment):
    """Episode of a row with tools and no environment."""

    def __init__(self, task: Task, functions: Sequence[Tool]) -> None:
        self._task = task
        self._functions = functions
        self._results: dict[int, ToolResult] = {}

    def reset(self, row: Row) -> Prompt:
        return self._task.prompt(row)

    def respond(self, turn: Turn) -> Observation | Awaitable[Observation]:
        return self._call(turn) if turn.tool_calls else Observation(done=True)

    def close(self) -> None:
        for function in self._functions:
            if isinstance(function, DescribedTool):
                function.close()

    async def _call(self, turn: Turn) -> Observation:
        observation = await call_tools(self._functions, turn, self._results)
        self._results.clear()
        return observation


async def call_tools(
    functions: Sequence[Tool], turn: Turn, results: dict[int, ToolResult] | None = None
) -> Observation:
    """Run the calls of a turn concurrently and return tool messages in order.

    Results in `results`, by position, are not repeated. Raises Retry after all calls have ended.
    """
    results = {} if results is None else results
    by_name = {tool_name(function): function for function in functions}
    tasks = {
        index: asyncio.create_task(_called(by_name, call))
        for index, call in enumerate(turn.tool_calls[:CALLS_MAX])
        if index not in results
    }
    again: Retry | None = None
    raised = ""
    try:
        if tasks:
            await asyncio.wait(tasks.values(), timeout=TOOL_LIMIT_S.get())
        for index, task in tasks.items():
            error = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(error, Retry):
                again = error
            else:
                results[index] = _outcome(task, error)
                raised = raised or _raised(turn.tool_calls[index].name, error)
    finally:
        for task in tasks.values():
            task.cancel()
    if again is not None:
        raise again
    too_many = ToolResult(text=f"error: only {CALLS_MAX} calls per turn are allowed", ok=False)
    shown = [results.get(index, too_many) for index in range(len(turn.tool_calls))]
    names = dict.fromkeys(call.name for call in turn.tool_calls if call.name in by_name)
    return Observation(
        done=False,
        messages=[
            _message(call, result) for call, result in zip(turn.tool_calls, shown, strict=True)
        ],
        tool=",".join(names),
        ok=all(result.ok for result in shown),
        error=raised,
    )


async def _called(by_name: dict[str, Tool], call: ToolCall) -> ToolResult:
    if call.error:
        return ToolResult(text=f"error: {call.error}", ok=False)
    function = by_name.get(call.name)
    if function is None:
        hint = nearest(call.name, by_name) or f"there are {', '.join(by_name)}"
        return ToolResult(text=f"error: unknown tool `{call.name}`: {hint}", ok=False)
    if isinstance(function, DescribedTool):
        return _shown(call.name, await call_in_thread(partial(function, **call.arguments)))
    try:
        given: Any = msgspec.convert(call.arguments, arguments_of(function))
    except msgspec.ValidationError as error:
        return ToolResult(text=f"error: arguments of `{call.name}`: {error}", ok=False)
    arguments = {name: getattr(given, name) for name in call.arguments}
    return _shown(call.name, await call_in_thread(partial(function, **arguments)))


def _shown(name: str, value: Any) -> ToolResult:
    try:
        return ToolResult(text=as_text(value), ok=True)
    except (NoValue, RecursionError) as error:
        unread = f"the model cannot read what the tool `{name}` gave: {error}\n"
        _log_first(name, type(value).__name__, unread)
        return ToolResult(
            text=f"error: `{name}` gave a value that cannot be shown: {error}", ok=False
        )


def _outcome(task: asyncio.Task[ToolResult], error: BaseException | None) -> ToolResult:
    if isinstance(error, ToolFailed):
        return ToolResult(text=f"error: {error}", ok=False)
    if error is not None:
        message = f"{type(error).__name__}: {message_line(str(error))}"
        return ToolResult(text=f"error: {message}", ok=False)
    if not task.done():
        return ToolResult(text=f"error: timed out after {TOOL_LIMIT_S.get():g} s", ok=False)
    if task.cancelled():
        return ToolResult(text="error: cancelled", ok=False)
    return task.result()


def _raised(name: str, error: BaseException | None) -> str:
    if error is None or isinstance(error, ToolFailed):
        return ""
    kind = type(error).__name__
    _log_first(name, kind, f"the tool `{name}` raised:\n{traceback_of(error)}")
    return message_line(f"{kind}: {with_place(error)}")


def _log_first(tool: str, kind: str, text: str) -> None:
    if (tool, kind) not in _logged and len(_logged) < LOGGED_MAX:
        _logged.add((tool, kind))
        sys.stderr.write(f"task: {text}")


def _message(call: ToolCall, result: ToolResult) -> dict[str, Any]:
    named = {"name": call.name} if call.name else {}
    return {"role": "tool", "tool_call_id": call.id, **named, "content": result.text}
