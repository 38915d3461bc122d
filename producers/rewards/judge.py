"""Reward `judge`: a score from a model at an OpenAI chat completions endpoint.

Temperature is 0. A busy endpoint and an answer without a score raise `Retry`; a rejection is final.
Answers are cached by their question.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.json_endpoint import (
    EndpointAway,
    EndpointRefused,
    JsonEndpoint,
    quoted,
    variable,
)
from dora_pipe.producers.rewards.arguments import Function, Options, RewardContext
from dora_pipe.producers.rewards.bounded import HELPER
from dora_pipe.producers.tasks.task import Message, Retry, Reward, Row
from dora_pipe.schemas.wire import canonical

if TYPE_CHECKING:
    import jinja2

SCORE: Final = r"(?i)\bscore\b\W{0,9}?(-?\d+(?:\.\d+)?)"

ANSWER_BYTES_MAX: Final = 4 << 20
ANSWER_CHARACTERS_MAX: Final = 20_000
"""Characters of the judge's answer in which the score is searched."""

Count = Annotated[int, Meta(ge=1)]
T = TypeVar("T")


class Judge(Options, frozen=True, kw_only=True):
    """Score of the text by another model.

    Parts are the `prompt_tokens` and `completion_tokens` of the original request.
    """

    model: str
    url: str = ""
    """Base URL, to which `/chat/completions` is appended."""
    url_env: str = ""
    """Environment variable with the URL."""
    key_env: str = ""
    """Environment variable with the key; keys are not allowed in configurations."""
    prompt: str = ""
    """Jinja template with the rubric, over `row`, `text`, `reasoning`, `turns` and `messages`."""
    prompt_file: str = ""
    """File with the template, relative to `task.directory`."""
    system: str = ""
    pattern: str = SCORE
    """Pattern of the score; the first group of the last match counts."""
    range: tuple[float, float] = (0.0, 1.0)
    """Range of the judge's scores, mapped to 0 to 1; scores outside are invalid."""
    max_tokens: Annotated[int, Meta(ge=0)] = 512
    """Token limit of the answer; 0 omits it."""
    body: dict[str, Any] = msgspec.field(default_factory=dict)
    """Additional or replaced fields of the request, such as `{temperature = 1}`."""
    concurrency: Annotated[int, Meta(ge=1, le=256)] = 64
    """Concurrent requests of one task process."""
    timeout_s: Annotated[float, Meta(gt=0)] = 8.0
    cache: str = ""
    """Cache folder, relative to `task.directory`; empty: the user's (`docs/rewards.md`)."""

    def open(self, where: str, context: RewardContext) -> Function:
        """Return the function; see Options. Raises ConfigError for missing or invalid options."""
        if bool(self.url) == bool(self.url_env):
            raise ConfigError(f"{where}: needs one of the options `url` and `url_env`")
        if "@" in self.url:  # URLs are stored and printed: do not repeat this one.
            raise ConfigError(f"{where}: no credentials in an address; see `key_env`")
        if self.timeout_s >= context.limit_s:
            raise ConfigError(
                f"{where}: timeout_s is {self.timeout_s:g}, and task.reward_timeout_s"
                f" {context.limit_s:g}",
                hint="raise task.reward_timeout_s above timeout_s",
            )
        low, high = self.range
        if not low < high:
            raise ConfigError(f"{where}: range: {low:g} is not below {high:g}")
        client = JudgeClient(self, where, context)
        asks_reasoning = "reasoning" in self.template(where, context)
        return client.score_reasoning if asks_reasoning else client.score

    def digested(self, where: str, context: RewardContext) -> tuple[str, ...]:
        return (self.template(where, context),)

    def template(self, where: str, context: RewardContext) -> str:
        """Return the prompt template. Raises ConfigError if there is none."""
        if bool(self.prompt) == bool(self.prompt_file):
            raise ConfigError(f"{where}: needs one of the options `prompt` and `prompt_file`")
        if self.prompt:
            return self.prompt
        try:
            return (Path(context.directory) / self.prompt_file).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{where}: prompt_file: {error}") from None


class JudgeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Cached answer."""

    reply: str
    prompt_tokens: int = 0
    completion_tokens: int = 0


class JudgeClient:
    """Client of one judge in a task process, with connections and cache."""

    def __init__(self, options: Judge, where: str, context: RewardContext) -> None:
        """Raises ConfigError for an invalid template or pattern, or an unset variable."""
        self._options = options
        self._template = _template(where, options.template(where, context))
        self._endpoint = JsonEndpoint(
            "the judge",
            options.url or variable(f"{where}: ", "url_env", options.url_env),
            key=variable(f"{where}: ", "key_env", options.key_env) if options.key_env else "",
            timeout_s=options.timeout_s,
            concurrency=options.concurrency,
            bytes_max=ANSWER_BYTES_MAX,
        )
        try:
            groups = re.compile(options.pattern).groups
        except re.error as error:
            raise ConfigError(f"{where}: pattern: {error}") from None
        if not groups:
            raise ConfigError(f"{where}: pattern: it needs a group around the score")
        kept = Path(options.cache).expanduser() if options.cache else cache_folder()
        self._kept = Path(context.directory) / kept
        self._threads = ThreadPoolExecutor(options.concurrency, thread_name_prefix="judge")
        self._asked: dict[str, asyncio.Future[JudgeAnswer]] = {}

    async def score(
        self, row: Row, text: str, turns: Sequence[str], messages: Sequence[Message]
    ) -> Reward:
        return await self.score_reasoning(row, text, turns, messages, reasoning="")

    async def score_reasoning(
        self, row: Row, text: str, turns: Sequence[str], messages: Sequence[Message], reasoning: str
    ) -> Reward:
        """Return the score, 0 to 1. Raises Retry for transient failures, TaskError if the
        endpoint rejects the request."""
        prompt = self._template.render(
            row=row, text=text, reasoning=reasoning, turns=turns, messages=messages
        )
        answer = await self._answered(self._question(prompt))
        # In a thread: it may take as long as the limits of `bounded`.
        return await self._in_thread(self._reward, answer)

    async def _answered(self, question: Mapping[str, Any]) -> JudgeAnswer:
        name = hashlib.sha256(canonical(question)).hexdigest()
        # Trajectories of a group often have equal texts at the same time.
        asked = self._asked.get(name)
        if asked is None:
            asked = self._in_thread(self._judged, question, name)
            self._asked[name] = asked
            asked.add_done_callback(lambda _: self._asked.pop(name))
        return await asyncio.shield(asked)

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    def close(self) -> None:
        self._threads.shutdown()
        self._endpoint.close()

    def _question(self, prompt: str) -> dict[str, Any]:
        options = self._options
        system = [{"role": "system", "content": options.system}] if options.system else []
        return {
            "model": options.model,
            "messages": [*system, {"role": "user", "content": prompt}],
            "temperature": 0,
            **({"max_tokens": options.max_tokens} if options.max_tokens else {}),
            **options.body,
        }

    def _judged(self, question: Mapping[str, Any], name: str) -> JudgeAnswer:
        path = self._kept / name[:2] / f"{name}.json"
        kept = _kept(path)
        if kept is not None:
            return kept
        asked = self._ask(question)
        self._read(asked.reply)  # Answers without a score are not cached.
        return _keep(path, asked)

    def _reward(self, answer: JudgeAnswer) -> Reward:
        value = self._read(answer.reply)
        spent = (answer.prompt_tokens, answer.completion_tokens)
        parts = dict(zip(("prompt_tokens", "completion_tokens"), map(float, spent), strict=True))
        return Reward(value=value, parts=parts)

    def _read(self, reply: str) -> float:
        reply = reply[-ANSWER_CHARACTERS_MAX:]
        score = _number(HELPER.ask("search", pattern=self._options.pattern, group="1", text=reply))
        low, high = self._options.range
        if score is None or not low <= score <= high:
            raise Retry(f"the judge gave no score from {low:g} to {high:g}: {quoted(reply)}")
        return (score - low) / (high - low)

    def _ask(self, question: Mapping[str, Any]) -> JudgeAnswer:
        try:
            body = self._endpoint.post("/chat/completions", question)
        except EndpointAway as error:
            raise Retry(error.message) from None
        except EndpointRefused as error:
            raise TaskError(error.message) from None
        return _judge_answer(body)


def cache_folder() -> Path:
    from dora_pipe.producers.data.prepare import cache_folder as of_data

    return of_data().with_name("judge")


def _template(where: str, text: str) -> jinja2.Template:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    try:
        return ImmutableSandboxedEnvironment(
            undefined=jinja2.StrictUndefined, finalize=_written
        ).from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"{where}: prompt, line {error.lineno}: {error.message}") from None


def _written(value: Any) -> Any:
    if value is None:
        raise TaskError("a value in the judge's prompt is null; `{{ row.x or '' }}` allows it")
    return value


class _Said(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Said


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


def _judge_answer(body: bytes) -> JudgeAnswer:
    try:
        completion = msgspec.json.decode(body, type=_Completion)
        content = completion.choices[0].message.content
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise Retry(f"the judge's answer is not a chat completion: {error}") from None
    usage = completion.usage or _Usage()
    return JudgeAnswer(
        reply=content or "",
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
    )


def _kept(path: Path) -> JudgeAnswer | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=JudgeAnswer)
    except (OSError, msgspec.DecodeError):
        return None


def _keep(path: Path, judged: JudgeAnswer) -> JudgeAnswer:
    """Cache an answer; return the first one, possibly of another process. A full disk is
    ignored."""
    partial = path.with_name(f"{path.stem}.{os.getpid()}.{threading.get_ident()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(msgspec.json.encode(judged))
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(partial)
        partial.unlink()
    except OSError as error:
        sys.stderr.write(f"judge: cannot cache an answer: {error}\n")
    return _kept(path) or judged


def _number(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
