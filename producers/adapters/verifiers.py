"""Environments of verifiers as tasks: `verifiers:NAME`.

NAME is an installed taskset, or a module next to the configuration. Verifiers computes the rewards
and runs the rollouts; its own server forwards a harness's calls to the session's address. A harness
program (PEP 723) usually gets an environment by `uv sync`; if its requirements are installed here,
it runs in this interpreter, offline. Programs die with the task process.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import math
import os
import re
import sys
import tomllib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from dora_pipe.core.errors import ConfigError
from dora_pipe.core.system.linux import dying
from dora_pipe.producers.adapters.episodes import packages_of
from dora_pipe.producers.tasks.agents import AgentTask
from dora_pipe.producers.tasks.calls import message_line
from dora_pipe.producers.tasks.task import Retry, Reward, Row, Split

VERSION: Final = "0.4."
"""Supported versions; interfaces change with the second number."""

_OUTSIDE: Final = ("InterceptionError", "SandboxError", "ToolsetError", "TunnelError")
"""Transient errors of verifiers: the rollout restarts."""

_SERVER_ERROR: Final = 500


class VerifiersError(Exception):
    """Episode that verifiers could not finish or score."""


class VerifiersTask(AgentTask):
    """Task `verifiers:NAME`."""

    def __init__(
        self,
        name: str,
        *,
        env: Mapping[str, Any] | None = None,
        eval_taskset: Mapping[str, Any] | None = None,
        count: int | None = None,
        eval_count: int = 64,
    ) -> None:
        """`eval_taskset` overrides keys of `taskset` for evaluation; without it, the first
        `eval_count` tasks are for evaluation only. `count` limits training tasks. Raises
        ConfigError."""
        self._kind = f"verifiers:{name}"
        self._vf = _verifiers(self._kind)
        config = dict(env or {})
        self._env = self._opened(config, name)
        self._seat = _seat(self._vf, self._kind, self._env, config)
        self._tasks = self._read(name, config, eval_taskset, count, eval_count)
        _let_programs_find(type(self._env.taskset).__module__)
        run_programs_here(importlib.import_module("verifiers.v1.runtimes"))
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None

    def rows(self, split: Split) -> Sequence[Row]:
        return [
            {
                "split": split,
                "at": index,
                "task": task.data.model_dump(mode="json", exclude_none=True, exclude_defaults=True),
            }
            for index, task in enumerate(self._tasks[split])
        ]

    def check(self) -> None:
        pairing = importlib.import_module("verifiers.v1.utils.compile")
        runtime = getattr(self._env.config, self._seat).runtime
        try:
            pairing.validate_pairing(
                self._harness(), self._kind_of_task(), runtime, tools=self._tools()
            )
        except ValueError as error:
            raise self._refused(error) from error

    async def play(self, base_url: str, api_key: str, row: Row) -> Reward:
        await self._served()
        with session_client(self._vf, base_url, api_key) as client:
            context = self._vf.ModelContext(model=MODEL, client=client)
            task = self._tasks[row["split"]][row["at"]]
            return reward_of(await self._env.run_episode(task, context), self._seat)

    def reward(self, row: Row, text: str, turns: Sequence[str]) -> float:
        """Return 0: a limit of the run ended the episode before scoring."""
        return 0.0

    def packages(self) -> Mapping[str, str]:
        objects = (self._env, self._env.taskset, self._harness(), *self._tools())
        kinds = (self._kind_of_task(), *map(type, objects))
        return packages_of("verifiers", *(kind.__module__ for kind in kinds))

    def reward_sources(self) -> Sequence[Any]:
        return (type(self), *(f"{name} {version}" for name, version in self.packages().items()))

    def _harness(self) -> Any:
        return self._vf.load_harness(self._env.config.agent_harnesses()[self._seat])

    def _kind_of_task(self) -> Any:
        return type(self._env.taskset).task_type()

    def _tools(self) -> list[Any]:
        taskset = self._env.taskset
        own = self._kind_of_task().toolsets(taskset.config.task)
        return [*own, *taskset.toolsets(taskset.config)]

    def _opened(self, config: Mapping[str, Any], name: str) -> Any:
        try:
            return self._vf.load_environment(self._config(config, name))
        except ModuleNotFoundError as error:
            if "not found (tried to import" not in str(error):
                raise  # a missing dependency of the package
            raise ConfigError(
                f"task.kind: `{self._kind}`: {message_line(str(error))}",
                hint=f"install it where verifiers is ({sys.executable}), or put "
                f"{name.replace('-', '_')}.py next to the configuration",
            ) from None
        except (ValueError, TypeError, AttributeError) as error:  # pydantic's are ValueErrors
            raise self._refused(error) from error

    def _refused(self, error: Exception) -> ConfigError:
        return ConfigError(f"task.options.env: `{self._kind}`: {message_line(str(error))}")

    def _config(self, config: Mapping[str, Any], name: str, **taskset: Any) -> Any:
        tasks = {**config.get("taskset", {}), **taskset, "id": name}
        return self._vf.resolve_env_config({**config, "taskset": tasks})

    def _read(
        self,
        name: str,
        config: Mapping[str, Any],
        eval_taskset: Mapping[str, Any] | None,
        count: int | None,
        eval_count: int,
    ) -> dict[Split, list[Any]]:
        if count is None and not self._env.taskset.bounded:
            raise ConfigError(
                f"task.kind: `{self._kind}` has an endless task list",
                hint="set task.options.count",
            )
        trained: Iterator[Any] = iter(self._env.taskset)
        if eval_taskset is None:
            evaluated = list(itertools.islice(trained, eval_count))
        else:
            other = self._vf.load_taskset(self._config(config, name, **eval_taskset).taskset)
            evaluated = list(itertools.islice(other, eval_count))
        train = list(itertools.islice(trained, count))
        if not train:
            raise ConfigError(
                f"task.kind: `{self._kind}` has {len(evaluated)} tasks, all used for evaluation",
                hint="task.options.eval_count, or task.options.eval_taskset",
            )
        return {"train": train, "eval": evaluated}

    async def _served(self) -> None:
        """Start servers of harnesses and shared tools; they run until the process ends."""
        if self._serving is None or (self._serving.done() and self._serving.exception()):
            self._serving = asyncio.ensure_future(self._serve())
        await asyncio.shield(self._serving)

    async def _serve(self) -> None:
        await self._stack.enter_async_context(self._env.serving())
        inner = self._env._interception
        self._env._interception = SessionInterception(self._vf, inner)


def reward_of(episode: Any, seat: str) -> Reward:
    """Return the mean reward over a seat's traces, with rewards and metrics as parts. Raises
    Retry, VerifiersError."""
    if not episode.ok:
        raise _failure([*episode.errors, *(error for of in episode.traces for error in of.errors)])
    # A single seat has no name.
    traces = [trace for trace in episode.traces if trace.agent.name in (seat, "", None)]
    unknown = {name for trace in traces for name, given in trace.rewards.items() if given is None}
    if unknown or not any(trace.rewards for trace in traces):
        raise VerifiersError(f"not scored: {', '.join(sorted(unknown)) or 'it has no reward'}")
    parts: dict[str, list[float]] = {}
    for trace in traces:
        rewards = {name: given.value for name, given in trace.rewards.items()}
        for name, number in (*trace.metrics.items(), *rewards.items()):
            if number is not None and math.isfinite(number):
                parts.setdefault(name, []).append(float(number))
    value = sum(trace.reward for trace in traces) / len(traces)
    return Reward(value=value, parts={name: sum(of) / len(of) for name, of in parts.items()})


def _verifiers(kind: str) -> Any:
    """Check the version before the import. Raises ConfigError."""
    hint = (
        "task.python names the interpreter of a virtual environment with"
        f' "verifiers=={VERSION}*" and msgspec'
    )
    try:
        version = importlib.metadata.version("verifiers")
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"task.kind: `{kind}`: verifiers is not installed in {sys.executable}", hint=hint
        ) from None
    if not version.startswith(VERSION):
        raise ConfigError(
            f"task.kind: `{kind}`: verifiers is {version} in {sys.executable}, not {VERSION}*",
            hint=hint,
        )
    return importlib.import_module("verifiers.v1")


def _seat(vf: Any, kind: str, env: Any, config: Mapping[str, Any]) -> str:
    """Return the single seat of the policy. Raises ConfigError."""
    seats = {
        name: seat_config
        for name, seat_config in env.config
        if isinstance(seat_config, vf.AgentConfig)
    }
    free = [name for name, seat in seats.items() if seat.client is None]
    if len(free) != 1:
        raise ConfigError(
            f"task.kind: `{kind}`: expected one policy seat, got {', '.join(free) or 'none'}",
            hint="set a `client` for every other seat: task.options.env.SEAT.client",
        )
    seat: str = free[0]
    if seats[seat].runtime.type == "prime" and "runtime" not in config.get(seat, {}):
        raise ConfigError(
            f"task.kind: `{kind}`: no runtime for the programs of `{seat}`",
            hint=f'task.options.env.{seat}.runtime.type: "subprocess" (this machine), "docker", '
            '... (default of verifiers: "prime")',
        )
    return seat


def _failure(errors: Sequence[Any]) -> Exception:
    if not errors:
        return VerifiersError("the episode failed without an error")
    first = errors[0]
    message = message_line(f"{first.type}: {first.message}")
    outside = first.type in _OUTSIDE or (first.status_code or 0) >= _SERVER_ERROR
    return Retry(message) if outside else VerifiersError(message)


def _let_programs_find(module: str) -> None:
    file = getattr(sys.modules[module.partition(".")[0]], "__file__", None)
    if file is None or "site-packages" in Path(file).parts:
        return
    folder = Path(file).parent.parent if Path(file).name == "__init__.py" else Path(file).parent
    paths = [str(folder), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


MODEL: Final = "policy"

_KEY_VARIABLE: Final = "DORA_PIPE_API_KEY_"
"""Prefix of key variables: verifiers reads keys from the environment, and hides names with
`API_KEY` from programs."""

_METADATA: Final = re.compile(r"(?m)^# /// script\s*$\n((?:^#(?:| .*)$\n)+?)^# ///\s*$")

_numbers = itertools.count()


@contextmanager
def session_client(vf: Any, base_url: str, api_key: str) -> Iterator[Any]:
    variable = f"{_KEY_VARIABLE}{next(_numbers)}"
    os.environ[variable] = api_key
    try:
        yield vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
    finally:
        del os.environ[variable]


class SessionInterception:
    """`Interception` of verifiers that routes each rollout to its own session."""

    def __init__(self, vf: Any, inner: Any) -> None:
        self._inner = inner
        # Verifiers never drops a client: all share the connections of one with a dummy endpoint.
        self._shared = vf.EvalClientConfig(base_url="http://session.invalid", api_key_var="-")
        _cut_by_a_limit.__annotations__["trace"] = vf.Trace  # verifiers calls it with this argument

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[Any]:
        """Yield the session's endpoint; a seat with its own client keeps it."""
        own = session.ctx
        if not own.client.api_key_var.startswith(_KEY_VARIABLE):
            async with self._inner.acquire(session) as slot:
                yield slot
            return
        session.ctx = dataclasses.replace(own, client=self._shared)
        async with self._inner.acquire(session) as slot:
            client = copy.copy(session.client)
            client.base_url = own.client.base_url
            client.api_key = os.environ[own.client.api_key_var]
            session.ctx, session.client = own, client
            session.trace_stops.append(_cut_by_a_limit)
            yield slot


def _cut_by_a_limit(trace: Any) -> bool:
    """Stop before the next call, which would be rejected, so that verifiers scores the rollout."""
    if not trace.calls or trace.calls[-1].finish_reason != "length":
        return False
    sampling = trace.calls[-1].sampling
    return sampling is None or sampling.max_tokens is None


def run_programs_here(runtimes: Any) -> None:
    """Replace the subprocess runtime of verifiers' module `runtimes`."""
    if getattr(runtimes.SubprocessRuntime, "here", False):
        return

    class HereRuntime(runtimes.SubprocessRuntime):  # type: ignore[misc]
        """Subprocess runtime that uses this interpreter if it has all requirements."""

        here = True

        async def run(self, argv: list[str], env: dict[str, str]) -> Any:
            return await super().run(dying(argv), env)

        async def run_background(self, argv: list[str], env: dict[str, str], log: str) -> None:
            await super().run_background(dying(argv), env, log)

        async def open_process(self, argv: list[str], env: dict[str, str]) -> Any:
            return await super().open_process(dying(argv), env)

        async def prepare_uv_script(
            self, script: str | bytes, env: dict[str, str] | None = None, **options: Any
        ) -> list[str]:
            text = script if isinstance(script, str) else script.decode()
            if missing_of(text):
                command: list[str] = await super().prepare_uv_script(script, env, **options)
                return command
            return [sys.executable, str(_written(text, Path(self.scripts_dir)))]

    runtimes.SubprocessRuntime = HereRuntime


@functools.lru_cache(maxsize=64)
def missing_of(script: str) -> tuple[str, ...]:
    """Return requirements of a script that this interpreter lacks, or ("metadata",) for a script
    without metadata.

    Example: ``missing_of(script) == ("mcp==2.0.0",)``.
    """
    # Verifiers depends on it; this project does not.
    requirement = importlib.import_module("packaging.requirements").Requirement
    block = _METADATA.search(script)
    if block is None:
        return ("metadata",)
    metadata = tomllib.loads(re.sub(r"(?m)^# ?", "", block[1]))
    asked = [requirement(dependency) for dependency in metadata.get("dependencies", ())]
    python = requirement(f"python{metadata.get('requires-python', '')}")
    version = ".".join(map(str, sys.version_info[:3]))
    missing = [] if python.specifier.contains(version) else [str(python)]
    return (
        *missing,
        *(str(package) for package in asked if not _installed(package)),
    )


def _installed(asked: Any) -> bool:
    if asked.marker is not None and not asked.marker.evaluate():
        return True
    try:
        version = importlib.metadata.version(asked.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return not asked.extras and bool(asked.specifier.contains(version, prereleases=True))


def _written(script: str, folder: Path) -> Path:
    path = folder / f"{hashlib.sha256(script.encode()).hexdigest()}.py"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        mine = path.with_suffix(f".{os.getpid()}.{next(_numbers)}")
        mine.write_text(script)
        mine.replace(path)
    return path
