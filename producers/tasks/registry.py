"""Opens a configured task and compares its digests with the run's."""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, InvariantBroken, TaskError
from dora_pipe.core.system.own_code import load_attribute, nearest
from dora_pipe.producers.data.rows import DataRows
from dora_pipe.producers.rewards.registry import Rewards, open_rewards
from dora_pipe.producers.tasks.arithmetic import Arithmetic
from dora_pipe.producers.tasks.calculator import CalculatorTask
from dora_pipe.producers.tasks.calls import TaskFacts
from dora_pipe.producers.tasks.dataset import DatasetTask
from dora_pipe.producers.tasks.task import Completion, Environment, Reward, Row, Split, Task
from dora_pipe.schemas.control import RunStarted
from dora_pipe.schemas.wire import canonical, sha256_hex

BUILT_IN: Mapping[str, type[Task]] = {
    "arithmetic": Arithmetic,
    "calculator": CalculatorTask,
    "dataset": DatasetTask,
}

ADAPTERS: Final[Mapping[str, str]] = {
    "gymnasium": "gymnasium:GymnasiumTask",
    "reasoning-gym": "reasoning_gym:ReasoningGymTask",
    "openenv": "openenv:OpenEnvTask",
    "verifiers": "verifiers:VerifiersTask",
}
"""Class in `producers.adapters` per prefix of `task.kind`; it receives the rest."""

HANDED: Final = (
    *("data", "eval_data", "split", "eval_split", "eval_share", "filter", "columns"),
    *("chat", "system_prompt", "tools"),
)
"""Keys of [task] passed to the task."""


def open_task(config: model.Task) -> Task:
    """Open a built-in task or `module:attribute`.

    A class or function is called with `options`, the set keys of `HANDED` and `task.reward`; a task
    without a reward parameter is wrapped in `OtherReward`. Users' modules run in this process;
    roles use a pool.

    Raises ConfigError for an unknown kind or option, TaskError if module or data cannot be used.
    """
    factory = _factory(config.kind)
    if config.reward and not _takes_reward(factory):
        alone = msgspec.structs.replace(config, reward="")
        return OtherReward(open_task(alone), open_rewards(config))
    given = {key: getattr(config, key) for key in HANDED}
    given["reward"] = open_rewards(config) if config.reward else None
    given["mcp"] = _mcp(config) if config.mcp else None
    arguments = {**config.options, **{key: value for key, value in given.items() if value}}
    if isinstance(factory, Task):
        if arguments:
            raise ConfigError(
                f"task: `{config.kind}` is an object and accepts no `{min(arguments)}`"
            )
        return factory
    _check_arguments(config.kind, factory, arguments, set(given))
    task = factory(**arguments)
    if not isinstance(task, Task):
        raise TaskError(f"task.kind: `{config.kind}` gave {type(task).__name__}, not a Task")
    if isinstance(task, DatasetTask):
        task.played = config.has_agent
    if any(use.group for use in config.rewards) and not task.scores_groups():
        raise ConfigError(
            f"task.reward: `{config.kind}` does not support group rewards",
            hint="implement score_group and scores_groups in the task",
        )
    return task


def _factory(kind: str) -> Task | Callable[..., Any]:
    if kind in BUILT_IN:
        return BUILT_IN[kind]
    package, colon, name = kind.partition(":")
    if package in ADAPTERS:
        return _adapter(package, name)
    if not colon:
        kinds = (*BUILT_IN, *(f"{prefix}:NAME" for prefix in ADAPTERS))
        raise ConfigError(
            f"task.kind: unknown task `{kind}`",
            hint=nearest(kind, BUILT_IN)
            or f"one of {', '.join(kinds)}, or module:attribute of your own",
        )
    factory = load_attribute("task.kind", kind, TaskError)
    if isinstance(factory, Task) or callable(factory):
        return factory  # type: ignore[no-any-return]
    raise TaskError(f"task.kind: `{kind}` is neither a Task nor a factory of one")


def _mcp(config: model.Task) -> Any:
    from dora_pipe.producers.adapters.mcp import McpTools

    return McpTools(config.mcp, directory=config.directory)


def _adapter(package: str, name: str) -> Callable[..., Any]:
    if not name:
        raise ConfigError(f"task.kind: `{package}:` needs a name after the colon")
    module, _, kind = ADAPTERS[package].partition(":")
    task_class = getattr(importlib.import_module(f"dora_pipe.producers.adapters.{module}"), kind)
    return functools.partial(task_class, name)


def _parameters(factory: Task | Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of a factory, or None if it takes anything or has no signature."""
    try:
        parameters = {} if isinstance(factory, Task) else inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return None  # the call will fail if needed
    anything = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return None if anything else parameters


def _takes_reward(factory: Task | Callable[..., Any]) -> bool:
    parameters = _parameters(factory)
    return parameters is None or "reward" in parameters


def _check_arguments(
    kind: str, factory: Callable[..., Any], arguments: Mapping[str, Any], keys: set[str]
) -> None:
    """Raises ConfigError."""
    parameters = _parameters(factory)
    if parameters is None:
        return
    for name in arguments:
        if name not in parameters:
            where = f"task.{name}" if name in keys else f"task.options.{name}"
            hint = nearest(name, parameters)
            raise ConfigError(f"{where}: `{kind}` has no such argument", hint=hint)
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"task.options: {error} of `{kind}`") from error


def rows_digest(rows: Sequence[Row], split: Split) -> tuple[str, int]:
    """Return sha256 (hex) and number of rows; files have a stored digest. Raises TaskError unless
    rows are plain JSON."""
    if isinstance(rows, DataRows):
        return rows.digest, len(rows)
    digest = hashlib.sha256()
    for index, row in enumerate(rows):
        try:
            digest.update(canonical(row))
        except (TypeError, ValueError, msgspec.MsgspecError) as error:
            raise TaskError(f"row {index} of `{split}` is not plain JSON: {error}") from error
        digest.update(b"\n")
    return digest.hexdigest(), len(rows)


def reward_digest(task: Task, *more: Any) -> str:
    """Return the sha256 (hex) of the source of reward modules, without imports, and of text.

    Returns "" if a source is unknown.
    """
    digest = hashlib.sha256()
    for source in (*task.reward_sources(), *more):
        if isinstance(source, str):
            digest.update(source.encode() + b"\0")
            continue
        module = sys.modules.get(getattr(source, "__module__", ""))
        try:
            text = inspect.getsource(module or source)
        except (OSError, TypeError):
            return ""
        digest.update(text.encode())
        digest.update(b"\0")
    return digest.hexdigest()


def reward_digest_of(facts: Iterable[TaskFacts]) -> str:
    digests = list(dict.fromkeys(task_facts.reward_digest for task_facts in facts))
    if len(digests) == 1 or "" in digests:
        return "" if "" in digests else digests[0]
    return sha256_hex("\n".join(digests).encode())


def packages_of(facts: Iterable[TaskFacts]) -> dict[str, str]:
    return dict(
        sorted(package for facts_of_task in facts for package in facts_of_task.packages.items())
    )


def check_scoring(facts: TaskFacts, run: RunStarted, sources: Sequence[str]) -> None:
    """Raises TaskError if group scoring differs from the run's."""
    for source in sources:
        if facts.scores_groups != (source in run.scored_together):
            raise TaskError(
                f"the task of {source} {'scores' if facts.scores_groups else 'does not score'} its"
                " groups here, unlike at the start of the run",
                hint="give every worker the code that the run started with",
            )


def check_data(facts: TaskFacts, run: RunStarted, sources: Sequence[str]) -> None:
    """Raises TaskError if data differ from the run's, InvariantBroken for another number of
    rows."""
    for source in sources:
        what = "data set" if source.startswith("train") else "evaluation data"
        if "/" in source:
            what = f"{what} of {source.partition('/')[2]}"
        mine, logged = facts.data(source), run.data(source)
        if logged is None or mine.digest != logged.digest:
            digest = "none" if logged is None else logged.digest
            raise TaskError(
                f"the {what} differs here ({mine.digest[:12]}) than the run's ({digest[:12]})",
                hint="give every worker the files that the run started with",
            )
        if mine.rows != logged.rows:
            raise InvariantBroken(
                f"`run started` of {run.run} was changed: the {what} with its digest has "
                f"{mine.rows} rows, logged are {logged.rows}",
                hint="`dora-pipe audit` says what else does not hold",
            )


SAME = (
    "rows",
    "check",
    "prompt",
    "tools",
    "single_turn",
    "demonstrations",
    "packages",
    "shown_tools",
    "notes",
)


class OtherReward(Task):
    """`task`, scored by `rewards`, which receive the columns of its rows by name."""

    def __init__(self, task: Task, rewards: Rewards) -> None:
        self._task, self._rewards = task, rewards
        self.replayable = task.replayable
        for name in SAME:
            setattr(self, name, getattr(task, name))

    def environment(self, row: Row) -> Environment | None:
        world = self._task.environment(row)
        return None if world is None else _Unscored(world)

    def score(self, row: Row, completion: Completion) -> float | Reward | Awaitable[float | Reward]:
        return self._rewards.score(row, completion)

    def score_group(
        self, row: Row, completions: Sequence[Completion]
    ) -> Sequence[Reward] | Awaitable[Sequence[Reward]]:
        return self._rewards.score_group(row, completions)

    def scores_groups(self) -> bool:
        return self._rewards.scores_groups

    def reward_sources(self) -> Sequence[Any]:
        return (*self._rewards.sources(), type(self._task))


class _Unscored(Environment):
    def __init__(self, world: Environment) -> None:
        for name in ("reset", "step", "respond", "close"):
            setattr(self, name, getattr(world, name))
