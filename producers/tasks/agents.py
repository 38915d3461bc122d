"""User-defined agents: functions or commands that call the model.

A function receives those of `base_url`, `api_key` and `row` that it names. A command reads
`OPENAI_BASE_URL`, `OPENAI_API_KEY` and `DORA_PIPE_ROW` (JSON) and may write its result as JSON to
the file `DORA_PIPE_RESULT`: null, text, a number, or an object with the fields of `Reward`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.linux import die_with
from dora_pipe.core.system.own_code import load_function
from dora_pipe.producers.tasks.execution import call_in_thread
from dora_pipe.producers.tasks.messages import NoAnswer
from dora_pipe.producers.tasks.task import Reward, Row, Task

GIVEN: Final = ("base_url", "api_key", "row")
"""Parameters of an agent function."""

RESULT_BYTES_MAX: Final = 1024 * 1024
TAIL_CHARACTERS: Final = 200

READ_BYTES: Final = 1 << 16
DRAIN_S: Final = 1.0

END_S: Final = 2.0


class AgentFailed(Exception):
    """A command exited with a status other than 0."""


class AgentTask(Task):
    """Task that is its own agent (`config.model.Task.is_agent`)."""

    async def play(self, base_url: str, api_key: str, row: Row) -> Any:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    """Agent of a task; `run` takes the values of `GIVEN`."""

    run: Callable[[str, str, Row], Awaitable[Any]]
    source: Any
    """See `Task.reward_sources`."""


def open_agent(config: model.Task, task: Task) -> Agent | None:
    """Return the agent of a task.

    Raises TaskError if its import fails, ConfigError if it cannot be called with `GIVEN`.
    """
    if isinstance(task, AgentTask):
        return Agent(run=task.play, source=type(task))
    if not config.agent:
        return None
    if isinstance(config.agent, str):
        return _function_agent(config.agent)
    run = partial(_run_command, tuple(config.agent), config.directory or None)
    return Agent(run=run, source="\0".join(config.agent))


def _function_agent(reference: str) -> Agent:
    function: Callable[..., Any] = load_function("task.agent", reference, TaskError)
    parameters = inspect.signature(function).parameters.values()
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = {
        parameter.name
        for parameter in parameters
        if parameter.kind is not parameter.POSITIONAL_ONLY
    }
    names = [name for name in GIVEN if anything or name in named]
    try:
        inspect.signature(function).bind(**dict.fromkeys(names))
    except TypeError as error:
        raise ConfigError(
            f"task.agent: `{reference}`: {error}", hint=f"it may take {', '.join(GIVEN)}"
        ) from None

    async def run(*values: Any) -> Any:
        given = dict(zip(GIVEN, values, strict=True))
        return await call_in_thread(partial(function, **{name: given[name] for name in names}))

    return Agent(run=run, source=function)


async def _run_command(
    command: Sequence[str], directory: str | None, base_url: str, api_key: str, row: Row
) -> Any:
    """Run a command in its own process group. Raises AgentFailed, NoAnswer, OSError."""
    with tempfile.TemporaryDirectory(prefix="dora-pipe-agent-") as folder:
        result = Path(folder) / "result.json"
        environment = {
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": api_key,
            "DORA_PIPE_ROW": msgspec.json.encode(dict(row)).decode(),
            "DORA_PIPE_RESULT": str(result),
        }
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=directory,
            env={**os.environ, **environment},
            process_group=0,
            preexec_fn=partial(die_with, os.getpid()),
        )
        tail = await _run_to_its_end(process)
        if process.returncode:
            raise AgentFailed(f"status {process.returncode}: {tail}")
        return _result(result)


async def _run_to_its_end(process: asyncio.subprocess.Process) -> str:
    """Return the tail of the output; cancellation kills the process."""
    draining = asyncio.create_task(_tail(process.stdout))
    try:
        await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # including its children
        if process.returncode is None:
            await process.wait()
        await asyncio.wait([draining], timeout=DRAIN_S)
        draining.cancel()
    return draining.result() if draining.done() and not draining.cancelled() else ""


async def _tail(stream: asyncio.StreamReader | None) -> str:
    assert stream is not None
    kept = b""
    while data := await stream.read(READ_BYTES):
        kept = (kept + data)[-4 * TAIL_CHARACTERS :]
    return " ".join(kept.decode("utf-8", "replace").split())[-TAIL_CHARACTERS:]


def _result(path: Path) -> Any:
    """Raises NoAnswer if the file is not a valid result."""
    try:
        with path.open("rb") as file:
            written = file.read(RESULT_BYTES_MAX + 1)
    except FileNotFoundError:
        return None
    if len(written) > RESULT_BYTES_MAX:
        raise NoAnswer(f"the result has more than {RESULT_BYTES_MAX} bytes")
    try:
        result = msgspec.json.decode(written)
        return msgspec.convert(result, Reward) if isinstance(result, dict) else result
    except msgspec.MsgspecError as error:
        raise NoAnswer(f"the result is not valid JSON: {error}") from None
