"""Binding of reward functions: parameter names select their arguments.

Functions of a trajectory use `KNOWN`, batched ones `LISTS`, functions of a group `OF_GROUP`. Other
names are options. A batch closes `WAIT_S` after its first call, or at `BATCH_MAX` calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.tasks.calls import CallState
from dora_pipe.producers.tasks.execution import CONTEXT, ELSEWHERE, CallContext, call_user_code
from dora_pipe.producers.tasks.messages import in_order
from dora_pipe.producers.tasks.task import Completion, Row

BATCH_MAX: Final = 64
WAIT_S: Final = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Batch:
    """Calls answered together."""

    given: list[Mapping[str, Any]] = field(default_factory=list)
    full: asyncio.Event = field(default_factory=asyncio.Event)
    contexts: list[CallContext] = field(default_factory=list)
    answers: asyncio.Task[Sequence[Any]] | None = None
    waiting: int = 0

    def report(self, state: CallState) -> None:
        """Report a state of all calls; none of them alone is in the main thread."""
        for context in self.contexts:
            context.report("running" if state == "main" else state)


class Batches:
    """Adapter from single calls to a function of lists."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self._function, self._options = function, options
        self._open: Batch | None = None

    async def ask(self, given: Mapping[str, Any]) -> Any:
        """Return the function's answer for one item. Raises its errors, and NoAnswer for a
        wrong number of answers."""
        batch = self._open
        if batch is None:
            batch = self._open = Batch()
            batch.answers = asyncio.create_task(self._answered(batch))
        assert batch.answers is not None
        index = len(batch.given)
        batch.given.append(given)
        batch.contexts.append(CONTEXT.get(ELSEWHERE))
        batch.waiting += 1
        if len(batch.given) == BATCH_MAX:
            self._close(batch)
        try:
            return (await asyncio.shield(batch.answers))[index]
        finally:
            batch.waiting -= 1
            if not batch.waiting:
                self._close(batch)
                batch.answers.cancel()
                await asyncio.wait([batch.answers])  # until the main thread is free

    def _close(self, batch: Batch) -> None:
        batch.full.set()
        if self._open is batch:
            self._open = None

    async def _answered(self, batch: Batch) -> Sequence[Any]:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(batch.full.wait(), WAIT_S)
        self._close(batch)
        lists = {name: [arguments[name] for arguments in batch.given] for name in batch.given[0]}
        first = batch.contexts[0]
        CONTEXT.set(CallContext(threads=first.threads, threaded=first.threaded, tell=batch.report))
        rewards = await call_user_code(partial(self._function, **lists, **self._options))
        return in_order("a reward of lists", rewards, len(batch.given))


KNOWN: Final = ("row", "text", "reasoning", "turns", "messages", "completion", "answer")
"""Arguments of a trajectory; `completion` contains all others except row and answer."""

LISTS: Final = {"rows": "row", "texts": "text", "answers": "answer", "completions": "completion"}
"""Batched arguments."""

OF_GROUP: Final = ("row", "answer", "completions", "texts")
"""Arguments of a group; `completions` and `texts` are in sample order."""

Function = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardContext:
    """Context in which rewards run."""

    directory: str = ""
    """Base of relative paths in options: `task.directory`."""
    limit_s: float = 10.0
    """Time limit of a score: `task.reward_timeout_s`."""


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the options of built-in rewards."""

    def open(self, where: str, context: RewardContext) -> Function:
        """Return the reward function, called by parameter names. `where` names it in messages.
        Raises ConfigError."""
        raise NotImplementedError

    def check_answer(self, answer: Any) -> None:
        """Raise TaskError for a row's answer that cannot be compared."""

    def digested(self, where: str, context: RewardContext) -> tuple[str, ...]:
        """Return external content that determines the score, such as files. Raises ConfigError
        if missing."""
        return ()


_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Function with its options and argument names."""

    function: Function
    takes: tuple[str, ...]
    """Names of `KNOWN`, `LISTS` or `OF_GROUP`."""
    options: Mapping[str, Any]
    batches: Batches | None = None

    def __call__(self, row: Row, scored: Completion | Sequence[Completion]) -> Any:
        """Score a trajectory, or the trajectories of a group together.

        Raises the function's errors, and TaskError for a row without an answer.
        """
        if self.batches is not None:
            return self.batches.ask({name: _given(LISTS[name], row, scored) for name in self.takes})
        given = {name: _given(name, row, scored) for name in self.takes}
        return self.function(**given, **self.options)


def _given(name: str, row: Row, scored: Completion | Sequence[Completion]) -> Any:
    match name:
        case "row":
            return row
        case "answer":
            if "answer" not in row:
                raise TaskError("the row has no column `answer`")
            return row["answer"]
        case "completion" | "completions":
            return scored
        case "texts":
            assert not isinstance(scored, Completion)
            return [completion.text for completion in scored]
        case _:
            return getattr(scored, name)


def bind(
    where: str, function: Function, options: Mapping[str, Any], *, group: bool = False
) -> Bound:
    """Bind `function` to its options; `where` names it in messages.

    Raises ConfigError for unknown parameters or options.
    """
    parameters = _parameters(where, function)
    named = (name for name, parameter in parameters.items() if parameter.kind in _NAMED)
    lists = not group and any(name in LISTS for name in named)
    available = OF_GROUP if group else tuple(LISTS) if lists else KNOWN
    takes = _taken(where, parameters, options, available)
    batches = Batches(function, options) if lists else None
    return Bound(function=function, takes=takes, options=dict(options), batches=batches)


def _parameters(where: str, function: Function) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as error:  # Some C functions have no signature.
        raise ConfigError(f"{where}: {error}", hint="call it from a Python function") from None


def _taken(
    where: str,
    parameters: Mapping[str, inspect.Parameter],
    options: Mapping[str, Any],
    available: tuple[str, ...],
) -> tuple[str, ...]:
    named = {name: parameter for name, parameter in parameters.items() if parameter.kind in _NAMED}
    anything = any(
        parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    what = "group" if available is OF_GROUP else "trajectory"
    takes = tuple(name for name in available if name in named and name not in options)
    for name in options:
        if name not in named and not anything:
            raise ConfigError(
                f"{where} has no option `{name}`",
                hint=nearest(name, [name for name in named if name not in available]),
            )
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if name not in takes and name not in options and not optional:
            raise ConfigError(
                f"{where} has a parameter `{name}`, not an argument of a {what} or an option",
                hint=nearest(name, available) or f"arguments of a {what}: {', '.join(available)}",
            )
    return takes
