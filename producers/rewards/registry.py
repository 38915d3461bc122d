"""Configured rewards: opens their functions and combines their scores.

The value is the sum of weight times score. If a reward returns None, the other weights grow in
proportion; if all do, the trajectory is invalid. Each score is a part under its name; a function's
own parts get that prefix. `raw` is the first reward's score. Rewards with `group` run once per
group. Synchronous functions run in sequence in the calling thread.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError, install_hint
from dora_pipe.core.system.own_code import load_function, nearest
from dora_pipe.producers.rewards.arguments import (
    Bound,
    Function,
    Options,
    RewardContext,
    bind,
)
from dora_pipe.producers.tasks.messages import NoAnswer, finite, in_order
from dora_pipe.producers.tasks.task import Completion, Reward, Row
from dora_pipe.schemas.wire import ABSTAINED, canonical

Summed = TypeVar("Summed")

KEY: Final = "task.reward"
_HERE: Final = "dora_pipe.producers.rewards"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltIn:
    """Built-in reward."""

    options: str
    """Module and class of its `Options`."""
    needs: str = ""
    """Required package of the extra `rewards`; its version is digested."""
    sources: tuple[str, ...] = ()
    """Other modules of this package that affect the score."""


BUILT_IN: Final[Mapping[str, BuiltIn]] = {
    "math": BuiltIn(options="texts:Math", needs="math-verify", sources=("bounded",)),
    "exact": BuiltIn(options="texts:Exact"),
    "none": BuiltIn(options="texts:NoReward"),
    "regex": BuiltIn(options="texts:Regex", sources=("bounded",)),
    "json-schema": BuiltIn(options="texts:JsonSchema", needs="jsonschema", sources=("bounded",)),
    "judge": BuiltIn(options="judge:Judge", needs="jinja2", sources=("bounded",)),
    "code": BuiltIn(options="programs:Code", sources=("sandbox", "texts")),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Open reward of the list."""

    name: str
    weight: float
    ask: Bound
    sources: tuple[Any, ...]
    """Objects (by their modules) and texts that determine the score (`Task.reward_sources`)."""
    check_answer: Callable[[Any], None]


class Rewards:
    """Combined scorer of a task's rewards; functions are imported on first use."""

    def __init__(
        self,
        uses: Sequence[model.RewardUse],
        *,
        single: bool = False,
        context: RewardContext | None = None,
    ) -> None:
        """Create a scorer; `single` names one reward whose answer is passed unchanged."""
        self._uses = tuple(uses)
        self._context = context or RewardContext()
        self._single = single
        self._bare = single and ":" in uses[0].use

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        """Return a number or Reward, or an awaitable if a function is `async`.

        Raises the functions' errors, NoAnswer naming a reward without a finite number, TaskError
        and ConfigError.
        """
        alone, _ = self._parts
        if self._bare:
            given: float | Reward = _asked(alone, row, completion)[0]
            return given  # An awaitable, or an invalid answer that the caller reports.
        answers = _asked(alone, row, completion)
        if any(map(inspect.isawaitable, answers)):
            return self._together(answers, functools.partial(_sum, alone))
        return _sum(alone, answers)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        """Score a group; return one Reward per completion, in order. See `score`."""
        alone, of_groups = self._parts
        answers = _asked(of_groups, row, completions)
        summed = functools.partial(_sums, of_groups, len(completions), bool(alone))
        if any(map(inspect.isawaitable, answers)):
            return self._together(answers, summed)
        return summed(answers)

    @property
    def scores_groups(self) -> bool:
        return any(use.group for use in self._uses)

    @property
    def wants_answer(self) -> bool:
        alone, of_groups = self._parts
        return any("answer" in part.ask.takes for part in (*alone, *of_groups))

    @property
    def wants_reasoning(self) -> bool:
        parts = (*self._parts[0], *self._parts[1])
        named = any("reasoning" in part.ask.takes for part in parts)
        return named or any(use.options.get("of") == "reasoning" for use in self._uses)

    def check_answer(self, answer: Any) -> None:
        """Raise TaskError for a row's answer that a reward cannot compare."""
        for part in self._parts[0]:
            part.check_answer(answer)

    def sources(self) -> tuple[Any, ...]:
        alone, of_groups = self._parts
        return tuple(source for part in (*alone, *of_groups) for source in part.sources)

    @functools.cached_property
    def _parts(self) -> tuple[tuple[Part, ...], tuple[Part, ...]]:
        parts: tuple[list[Part], list[Part]] = ([], [])
        for index, use in enumerate(self._uses):
            key = KEY if self._single else f"{KEY}[{index}]"
            parts[use.group].append(_open(key, use, self._context))
        return tuple(parts[0]), tuple(parts[1])

    async def _together(
        self, results: Sequence[Any], summed: Callable[[Sequence[Any]], Summed]
    ) -> Summed:
        """Await all; on an error or cancellation, cancel the rest."""
        waiting = [
            asyncio.ensure_future(answer) for answer in results if inspect.isawaitable(answer)
        ]
        try:
            await asyncio.gather(*waiting)
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        answers = iter(waiting)
        return summed(
            [
                next(answers).result() if inspect.isawaitable(answer) else answer
                for answer in results
            ]
        )


def _asked(parts: Sequence[Part], *asked: Any) -> list[Any]:
    answers: list[Any] = []
    try:
        for part in parts:
            answers.append(part.ask(*asked))
    finally:
        if len(answers) < len(parts):
            _drop(answers)
    return answers


def _sum(asked: Sequence[Part], answers: Sequence[Any]) -> Reward:
    value, answer = 0.0, ""
    parts: dict[str, float] = {}
    scored = [part for part, answer in zip(asked, answers, strict=True) if answer is not None]
    for part, part_answer in zip(asked, answers, strict=True):
        if part_answer is None:
            parts |= _abstained([part])
            continue
        reward = part_answer if isinstance(part_answer, Reward) else Reward(value=part_answer)
        score = parts[part.name] = finite(f"the reward `{part.name}`", reward.value)
        value += part.weight * score
        answer = answer or reward.answer
        parts |= {f"{part.name}.{name}": inner for name, inner in reward.parts.items()}
    total, counted = _weight(asked), _weight(scored)
    if (asked and not scored) or (total and not counted):
        silent = [part.name for part in asked if part not in scored]
        raise NoAnswer(f"every reward abstained: {', '.join(silent)}")
    if counted:
        value *= total / counted
    raw = parts.get(asked[0].name) if asked else None
    return Reward(value=value, raw=raw, parts=parts, answer=answer)


def _weight(parts: Sequence[Part]) -> float:
    return math.fsum(abs(part.weight) for part in parts)


def _abstained(parts: Sequence[Part]) -> dict[str, float]:
    return {f"{part.name}.{ABSTAINED}": 1.0 for part in parts}


def _sums(asked: Sequence[Part], count: int, keep: bool, answers: Sequence[Any]) -> list[Reward]:
    """If all abstain on all trajectories, they leave the single rewards unchanged (`keep`)."""
    given = [
        in_order(f"the reward `{part.name}`", answer, count)
        for part, answer in zip(asked, answers, strict=True)
    ]
    if keep and all(value is None for items in given for value in items):
        return [Reward(value=0.0, parts=_abstained(asked))] * count
    return [_sum(asked, row) for row in zip(*given, strict=True)]


def open_rewards(task: model.Task) -> Rewards:
    """Return the scorer of `task.reward`, without importing functions. Raises ConfigError if
    empty."""
    context = RewardContext(directory=task.directory, limit_s=task.reward_timeout_s)
    if isinstance(task.reward, str):
        return single(task.reward, context)
    return Rewards(task.reward, context=context)


def single(use: str, context: RewardContext | None = None) -> Rewards:
    """Return the scorer of one reward named as in `task.reward`. Raises ConfigError if empty."""
    if not use:
        raise ConfigError(
            "task.reward: a reward is needed",
            hint=f'one of {", ".join(BUILT_IN)}, or your own function, such as "rewards:score"',
        )
    return Rewards((model.RewardUse(use=use),), single=True, context=context)


def _open(key: str, use: model.RewardUse, context: RewardContext) -> Part:
    where = f"{key}: `{use.use}`"
    sources: tuple[Any, ...]
    options: Mapping[str, Any] = use.options
    check = Options().check_answer
    if use.use in BUILT_IN:
        chosen, sources = _built_in(where, BUILT_IN[use.use], options, context)
        ask = bind(where, chosen.open(where, context), {})
        check = chosen.check_answer if "answer" in ask.takes else check
    elif ":" in use.use:
        function = load_function(key, use.use, TaskError)
        sources = (function,)
        if inspect.isclass(function):
            function, options = _build(where, function, options), {}
        ask = bind(where, function, options, group=use.group)
    else:
        raise ConfigError(
            f"{key}: unknown reward `{use.use}`",
            hint=nearest(use.use, BUILT_IN)
            or f"one of {', '.join(BUILT_IN)}, or module:function of your own",
        )
    if key != KEY:
        sources += (canonical(msgspec.to_builtins(use)).decode(),)
    return Part(name=use.called, weight=use.weight, ask=ask, sources=sources, check_answer=check)


def _built_in(
    where: str, kind: BuiltIn, given: Mapping[str, Any], context: RewardContext
) -> tuple[Options, tuple[Any, ...]]:
    sources: tuple[Any, ...] = tuple(
        importlib.import_module(f"{_HERE}.{name}") for name in kind.sources
    )
    if kind.needs:
        try:
            sources += (f"{kind.needs} {importlib.metadata.version(kind.needs)}",)
        except importlib.metadata.PackageNotFoundError:
            raise ConfigError(f"{where} needs {kind.needs}", hint=install_hint("rewards")) from None
    module, _, name = kind.options.partition(":")
    options: type[Options] = getattr(importlib.import_module(f"{_HERE}.{module}"), name)
    for key in given:
        if key not in options.__struct_fields__:
            hint = nearest(key, options.__struct_fields__)
            default_hint = f"it takes {', '.join(options.__struct_fields__) or 'none'}"
            raise ConfigError(f"{where} has no option `{key}`", hint=hint or default_hint)
    try:
        chosen = msgspec.convert(dict(given), options)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {error}") from None
    sources += chosen.digested(where, context)
    return chosen, (options, *sources)


def _build(where: str, kind: type, options: Mapping[str, Any]) -> Function:
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{where}: options: {error}") from error
    function: object = kind(**options)
    if not callable(function):
        raise TaskError(f"{where} is a class without `__call__`")
    return function


def _drop(answers: Sequence[Any]) -> None:
    for answer in answers:
        if inspect.iscoroutine(answer):
            answer.close()
