"""Environments of an OpenEnv server as tasks: `openenv:http://host:8000`.

    GET /schema, /metadata   form of an action; environment and version
    websocket /ws            one connection per episode: {"type": "reset", "data": {"seed": 7}} and
                             {"type": "step", "data": {"message": "..."}}, each answered by
                             {"type": "observation", "data": {"observation": {...}, "reward": 1,
                             "done": false}} or {"type": "error", ...}

A lost connection loses its episode, which does not count as the model's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.adapters.episodes import (
    DIGEST_CHARACTERS,
    PromptFormat,
    SeededEpisode,
    SeededTask,
    required,
)
from dora_pipe.producers.tasks.task import Environment, Observation, Prompt, Retry, Row
from dora_pipe.producers.tasks.values import observation_text
from dora_pipe.schemas.wire import canonical

MESSAGE_BYTES_MAX: Final = 4 << 20

ASK_S: Final = 30.0
"""Seconds to read the server's description and to connect."""

_MISTAKES: Final = ("VALIDATION_ERROR",)

_AWAY: Final = ("CAPACITY_REACHED", "SESSION_ERROR", "FACTORY_ERROR")
"""Error codes of transient failures."""


class OpenEnvTask(SeededTask):
    """Task `openenv:URL`."""

    def __init__(
        self,
        url: str,
        *,
        field: str = "",
        observe: str = "",
        act: str = "",
        reset: Mapping[str, Any] | None = None,
        sessions: int = 64,
        max_mistakes: int = 2,
        seed: int = 1,
        count: int = 1024,
        eval_count: int = 64,
        chat: bool = False,
        system_prompt: str = "",
    ) -> None:
        """Options are in docs/environments.md. Raises ConfigError, and TaskError if the server
        does not describe actions."""
        kind = f"openenv:{url}"
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"task.kind: `{kind}`: expected http:// or https://")
        super().__init__(
            name="openenv",
            seed=seed,
            count=count,
            eval_count=eval_count,
            prompt_format=PromptFormat(chat=chat, system_prompt=system_prompt),
            observe=observe,
            act=act,
            max_mistakes=max_mistakes,
        )
        self.client = required(
            "websockets.asyncio.client", package="websockets", extra="openenv", kind=kind
        )
        self.url, self.where = url.rstrip("/"), f"the environment at {url}"
        self._schema, self._about = (
            _got(self.where, f"{self.url}/{asked}") for asked in ("schema", "metadata")
        )
        self._field, self._type = ("", "") if act else self._fit(field)
        self.begin = dict(reset or {})
        if sessions < 1:
            raise ConfigError(f"task.options.sessions: {sessions} is invalid")
        self.room = asyncio.Semaphore(sessions)
        """Limit of concurrent episodes in a task process; others wait."""

    def environment(self, row: Row) -> Environment:
        return RemoteEpisode(self)

    def packages(self) -> Mapping[str, str]:
        digest = hashlib.sha256(canonical(self._schema)).hexdigest()[:DIGEST_CHARACTERS]
        version = self._about.get("version") or "-"
        return {f"openenv:{self._about.get('name', '')}": f"{version} {digest}"}

    def describe(self, observation: Any) -> str:
        if self.observe is not None:
            return observation_text(self.observe(observation))
        fields = {
            name: value
            for name, value in dict(observation).items()
            if name != "metadata" and value is not None
        }
        if len(fields) == 1:
            return _plain(*fields.values())
        return "\n".join(f"{name}: {_plain(value)}" for name, value in fields.items())

    def read(self, text: str) -> dict[str, Any]:
        """Return the action of a turn. Raises ValueError, shown to the model, if it is invalid."""
        if self.act is not None:
            return dict(self.act(text))
        value: Any = text
        if self._type in ("integer", "number"):
            try:
                value = int(text) if self._type == "integer" else float(text)
            except ValueError:
                raise ValueError(f"{self._field} is {self._type}, not {text.strip()!r}") from None
        return {self._field: value}

    def _fit(self, field: str) -> tuple[str, str]:
        action = self._schema.get("action", {})
        fields = {
            name: schema
            for name, schema in action.get("properties", {}).items()
            if name != "metadata"
        }
        required = [name for name in action.get("required", ()) if name in fields] or list(fields)
        if field and field not in fields:
            hint = nearest(field, fields) or f"it has {', '.join(fields)}"
            raise ConfigError(f"task.options.field: an action has no `{field}`", hint=hint)
        if not field and len(required) != 1:
            raise ConfigError(
                f"task.options.field: which one of {', '.join(required) or 'none'} is the text?",
                hint="or set task.options.act, a function from a turn to an action",
            )
        name = field or required[0]
        return name, str(fields[name].get("type", "string"))


class RemoteEpisode(SeededEpisode[OpenEnvTask]):
    """Episode in its own connection."""

    _socket: Any = None
    _entered = False

    async def reset(self, row: Row) -> Prompt:  # type: ignore[override]
        await self.task.room.acquire()
        self._entered, answer = True, None
        try:
            await self._connect()
            answer = await self._ask("reset", {"seed": row["seed"], **self.task.begin})
        finally:
            if answer is None:  # no other code closes an episode that failed to start
                await self.close()
        return self.task.prompt_format.first(f"{self.task.describe(answer['observation'])}\n")

    async def step(self, text: str) -> Observation:  # type: ignore[override]
        try:
            answer = await self._ask("step", self.task.read(text))
        except ValueError as error:
            return self.mistaken(f"\nerror: {error}\n")
        self.steps += 1
        self.total += float(answer.get("reward") or 0.0)
        self.ended = bool(answer.get("done"))
        if self.ended:
            return Observation(done=True)
        return self.task.prompt_format.then(f"\n{self.task.describe(answer['observation'])}\n")

    async def close(self) -> None:  # type: ignore[override]
        socket, self._socket = self._socket, None
        try:
            if socket is not None:
                await socket.close()
        finally:
            if self._entered:
                self._entered = False
                self.task.room.release()

    async def _connect(self) -> None:
        address = f"ws{self.task.url.removeprefix('http')}/ws"
        try:
            self._socket = await self.task.client.connect(
                address, open_timeout=ASK_S, max_size=MESSAGE_BYTES_MAX, proxy=None
            )
        except (OSError, TimeoutError, _failure()) as error:
            raise Retry(f"{self.task.where} refused the connection: {error}") from None

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Raises ValueError for an invalid action, Retry if the server is away, RuntimeError if
        the environment fails."""
        if self._socket is None:
            raise Retry(f"{self.task.where} closed the connection of the episode")
        message = msgspec.json.encode({"type": kind, "data": data}).decode()
        try:
            with contextlib.suppress(_failure()):  # read messages sent before it closed
                await self._socket.send(message)
            answer = msgspec.json.decode(await self._socket.recv())
        except (OSError, _failure()) as error:
            socket, self._socket = self._socket, None
            await socket.close()
            raise Retry(f"{self.task.where} ended the episode: {error}") from None
        content = answer.get("data", {})
        if answer.get("type") != "error":
            return dict(content)
        code, words = content.get("code"), content.get("message", "it failed")
        if code in _MISTAKES:
            problems = [
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in _problems(content)
            ]
            raise ValueError("; ".join(problems) or words)
        if code in _AWAY:
            raise Retry(f"{self.task.where}: {words}")
        raise RuntimeError(f"{self.task.where}: {words}")


def _problems(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    problems = content.get("errors") or ()
    return [
        problem
        for problem in problems
        if isinstance(problem, dict) and {"loc", "msg"} <= set(problem)
    ]


def _failure() -> type[Exception]:
    from websockets.exceptions import WebSocketException

    return WebSocketException


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _got(where: str, url: str) -> dict[str, Any]:
    import httpx2

    try:
        answer = httpx2.get(url, timeout=ASK_S, trust_env=False)
        content = answer.raise_for_status().json()
    except (httpx2.HTTPError, ValueError) as error:
        raise TaskError(f"{where} has no metadata: {error}") from None
    if not isinstance(content, dict):
        raise TaskError(f"{where} has no metadata: {url} returned no object")
    return content
