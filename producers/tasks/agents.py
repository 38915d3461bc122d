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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec

from dora_pipe.config import model
from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.linux import die_with
from dora_pipe.core.system.own_code import load_attribute
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


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAsked:
    """Arguments of an agent."""

    base_url: str
    api_key: str
    row: Row


class FunctionAgent:
    """Function of `task.agent`. Raises TaskError if the import fails, ConfigError if it cannot be
    called with `GIVEN`."""

    def __init__(self, reference: str) -> None:
        self.function: Callable[..., Any] = load_attribute("task.agent", reference, TaskError)
        if not callable(self.function):
            raise ConfigError(f"task.agent: `{reference}` is not a function")
        parameters = inspect.signature(self.function).parameters.values()
        anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = {
            parameter.name
            for parameter in parameters
            if parameter.kind is not parameter.POSITIONAL_ONLY
        }
        self._names = GIVEN if anything else tuple(name for name in GIVEN if name in named)
        try:
            inspect.signature(self.function).bind(**dict.fromkeys(self._names))
        except TypeError as error:
            raise ConfigError(
                f"task.agent: `{reference}`: {error}", hint=f"it may take {', '.join(GIVEN)}"
            ) from None

    @property
    def source(self) -> Any:
        return self.function

    async def run(self, asked: AgentAsked) -> Any:
        given = {name: getattr(asked, name) for name in self._names}
        return await call_in_thread(partial(self.function, **given))


class CommandAgent:
    """Command of `task.agent`, run in its own process group."""

    def __init__(self, command: Sequence[str], directory: str) -> None:
        self._command, self._directory = tuple(command), directory or None

    @property
    def source(self) -> Any:
        return "\0".join(self._command)

    async def run(self, asked: AgentAsked) -> Any:
        """Raises AgentFailed, NoAnswer, OSError."""
        with tempfile.TemporaryDirectory(prefix="dora-pipe-agent-") as folder:
            result = Path(folder) / "result.json"
            environment = {
                "OPENAI_BASE_URL": asked.base_url,
                "OPENAI_API_KEY": asked.api_key,
                "DORA_PIPE_ROW": msgspec.json.encode(dict(asked.row)).decode(),
                "DORA_PIPE_RESULT": str(result),
            }
            process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                cwd=self._directory,
                env={**os.environ, **environment},
                process_group=0,
                preexec_fn=partial(die_with, os.getpid()),
            )
            tail = await _run_to_its_end(process)
            if process.returncode:
                raise AgentFailed(f"status {process.returncode}: {tail}")
            return _result(result)


class AgentTask(Task):
    """Task that is its own agent (`config.model.Task.is_agent`)."""

    async def play(self, base_url: str, api_key: str, row: Row) -> Any:
        raise NotImplementedError


class OwnAgent:
    """Agent of an `AgentTask`."""

    def __init__(self, task: AgentTask) -> None:
        self._task = task

    @property
    def source(self) -> Any:
        return type(self._task)

    async def run(self, asked: AgentAsked) -> Any:
        return await self._task.play(asked.base_url, asked.api_key, asked.row)


Agent = FunctionAgent | CommandAgent | OwnAgent


def open_agent(config: model.Task, task: Task) -> Agent | None:
    """Return the agent of a task. Raises as `FunctionAgent`."""
    if isinstance(task, AgentTask):
        return OwnAgent(task)
    if isinstance(config.agent, str):
        return FunctionAgent(config.agent) if config.agent else None
    return CommandAgent(config.agent, config.directory) if config.agent else None


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
