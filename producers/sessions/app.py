"""The endpoint as an ASGI application.

    GET  /s/SESSION/v1/models
    POST /s/SESSION/v1/chat/completions
    POST /s/SESSION/v1/responses                 OpenAI responses
    POST /s/SESSION/v1/messages                  Anthropic messages
    POST /s/SESSION/inference/v1/generate        token ids; also under /v1

The key is checked before the body is read. Answers are durable before they are sent, so a stream
has its whole answer at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.sessions import (
    anthropic_messages,
    chat_completions,
    openai_responses,
    token_generate,
)
from dora_pipe.producers.sessions.calls import CallRequest, Refused, Sampled
from dora_pipe.producers.sessions.conversations import Prompt
from dora_pipe.producers.sessions.sessions import Session, Sessions, prompt_of, sampled_of

BODY_BYTES_MAX: Final = 64 * 1024 * 1024

BODIES_BYTES_MAX: Final = 256 * 1024 * 1024
"""All bodies being read; beyond it, requests get 503."""

BODY_S: Final = 60.0

SEND_S: Final = 60.0

LARGE_BYTES: Final = 128 * 1024
"""Size above which a body is processed in a thread, one at a time."""

TOKEN_BYTES_MAX: Final = 256
SMALL_BYTES: Final = 1024 * 1024
"""A body above this plus TOKEN_BYTES_MAX per context token cannot fit."""

_JSON: Final = "application/json"
_ENCODER: Final = msgspec.json.Encoder()

Handle = Callable[[Session, bytes, Request], Awaitable[Response]]


class Endpoint:
    """HTTP handlers."""

    def __init__(self, sessions: Sessions, *, model: str, vocabulary: int) -> None:
        self._sessions = sessions
        self._model = model
        self._vocabulary = vocabulary
        self._bodies_bytes = 0
        self._large = asyncio.Semaphore(1)
        self._answers = 0

    def app(self) -> Starlette:
        base = "/s/{session}"
        posts: dict[str, Handle] = {
            f"{base}/v1/chat/completions": self._chat,
            f"{base}/v1/responses": self._responses,
            f"{base}/v1/messages": self._messages,
            f"{base}/inference/v1/generate": self._generate,
            f"{base}/v1/inference/v1/generate": self._generate,
        }
        routes = [
            Route(path, _Guarded(self, handle), methods=["POST"]) for path, handle in posts.items()
        ]
        routes.append(Route(f"{base}/v1/models", _Guarded(self, self._models), methods=["GET"]))
        return Starlette(routes=routes)

    async def respond(self, request: Request, handle: Handle) -> Response:
        anthropic = handle == self._messages
        try:
            name = request.path_params["session"]
            session = await self._sessions.session(name, _key(request))
            return await handle(session, await self._body(request), request)
        except Refused as error:
            return _refusal(error, anthropic=anthropic)
        except TaskError as error:  # chat template or turn parser
            return _refusal(Refused(400, "invalid_request", error.message), anthropic=anthropic)

    async def _models(self, session: Session, body: bytes, request: Request) -> Response:
        model = {
            "id": self._model,
            "object": "model",
            "created": 0,
            "owned_by": "dora-pipe",
            "max_model_len": self._sessions.context_tokens,
        }
        return _json({"object": "list", "data": [model]})

    async def _chat(self, session: Session, body: bytes, request: Request) -> Response:
        asked, call = chat_completions.read(body, _caller(request))
        prompt, sampled = await self._sampled(session, call, len(body))
        answer = chat_completions.answer(
            asked,
            sampled,
            answer_id=f"chatcmpl-{self._number()}",
            created_s=int(time.time()),
            pieces=_pieces(session, sampled) if asked.logprobs else (),
            prompt_ids=() if prompt is None else prompt.ids,
        )
        return _events(chat_completions.events(asked, answer)) if asked.stream else _json(answer)

    async def _responses(self, session: Session, body: bytes, request: Request) -> Response:
        asked, call = openai_responses.read(body, _caller(request))
        _, sampled = await self._sampled(session, call, len(body))
        answer = openai_responses.answer(
            asked, sampled[0], number=self._number(), created_s=int(time.time())
        )
        return _events(openai_responses.events(answer)) if asked.stream else _json(answer)

    async def _messages(self, session: Session, body: bytes, request: Request) -> Response:
        asked, call = anthropic_messages.read(body, _caller(request))
        _, sampled = await self._sampled(session, call, len(body))
        answer = anthropic_messages.answer(asked, sampled[0], number=self._number())
        return _events(anthropic_messages.events(answer)) if asked.stream else _json(answer)

    async def _generate(self, session: Session, body: bytes, request: Request) -> Response:
        source = session.source
        stop_ids = source.tokenizer.stop_ids if source.chat is None else source.chat.stop_ids
        asked, call = token_generate.read(
            body, vocabulary=self._vocabulary, stop_ids=frozenset(stop_ids), caller=_caller(request)
        )
        _, sampled = await self._sampled(session, call, len(body))
        return _json(token_generate.answer(asked, sampled, answer_id=f"gen-{self._number()}"))

    async def _sampled(
        self, session: Session, call: CallRequest, body_bytes: int
    ) -> tuple[Prompt | None, list[Sampled]]:
        """Return samples of a durable call. Raises Refused, TaskError."""
        if body_bytes > LARGE_BYTES:
            async with self._large:
                prompt = await asyncio.to_thread(prompt_of, session, call, in_thread=True)
        else:
            prompt = prompt_of(session, call)
        ids = list(call.token_ids) if prompt is None else prompt.ids
        answers = await self._sessions.ask(session, call, ids)
        return prompt, sampled_of(session, call, prompt, answers)

    async def _body(self, request: Request) -> bytes:
        """Read a body. Raises Refused if too large, slow or many."""
        announced = request.headers.get("content-length", "0")
        if announced.isdecimal() and int(announced) > BODY_BYTES_MAX:
            raise _too_large()
        parts: list[bytes] = []
        taken = 0
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.stream():
                    taken += len(part)
                    self._bodies_bytes += len(part)
                    if taken > BODY_BYTES_MAX:
                        raise _too_large()
                    if self._bodies_bytes > BODIES_BYTES_MAX:
                        raise Refused(503, "overloaded", "too many large requests: retry later")
                    parts.append(part)
            self._check_length(taken)
            return b"".join(parts)
        except TimeoutError:
            raise Refused(408, "timeout", f"the body did not arrive within {BODY_S:g} s") from None
        finally:
            self._bodies_bytes -= taken

    def _check_length(self, body_bytes: int) -> None:
        most = self._sessions.context_tokens
        if body_bytes > most * TOKEN_BYTES_MAX + SMALL_BYTES:
            raise Refused(
                400,
                "context_length_exceeded",
                f"{body_bytes} bytes exceed a prompt of {most} tokens",
            )

    def _number(self) -> int:
        self._answers += 1
        return self._answers


class _Guarded:
    """Endpoint of a path; drops clients that do not read."""

    def __init__(self, endpoint: Endpoint, handle: Handle) -> None:
        self._endpoint, self._handle = endpoint, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._endpoint.respond(Request(scope, receive), self._handle)
            async with asyncio.timeout(SEND_S):
                await response(scope, receive, send)
        except (ClientDisconnect, TimeoutError, asyncio.CancelledError):
            return  # client or process ended


def _key(request: Request) -> str:
    """Return the bearer token, or Anthropic's."""
    kind, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else request.headers.get("x-api-key", "")


def _caller(request: Request) -> str:
    return request.headers.get("x-caller", "")


def _too_large() -> Refused:
    return Refused(413, "body_too_large", f"a body has at most {BODY_BYTES_MAX} bytes")


def _json(answer: Mapping[str, Any]) -> Response:
    return Response(_ENCODER.encode(answer), media_type=_JSON)


def _events(events: Iterable[tuple[str, Any]]) -> Response:
    lines: list[bytes] = []
    for name, value in events:
        if name:
            lines.append(f"event: {name}\n".encode())
        lines += [b"data: ", value.encode() if isinstance(value, str) else _ENCODER.encode(value)]
        lines.append(b"\n\n")
    return Response(b"".join(lines), media_type="text/event-stream")


def _pieces(session: Session, sampled: Sequence[Sampled]) -> list[list[str]]:
    tokenizer = session.source.tokenizer
    return [[tokenizer.full_text([token]) for token in choice.token_ids] for choice in sampled]


def _refusal(error: Refused, *, anthropic: bool) -> Response:
    headers = {"x-should-retry": "true" if error.code in _AGAIN else "false"}
    if error.code in _AGAIN:
        headers["retry-after"] = "1"
    if error.status in (401, 404, 408, 413):
        headers["connection"] = "close"  # discard the unread body
    if anthropic:
        kind = anthropic_messages.error_type(error.status)
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": error.message}}
    else:
        kind = "invalid_request_error" if error.status < 429 else "rate_limit_error"
        details = {"message": error.message, "type": kind, "param": None, "code": error.code}
        body = {"error": details}
    return Response(_ENCODER.encode(body), error.status, headers, _JSON)


_AGAIN: Final = ("too_many_open", "overloaded")
"""Codes that clients retry."""
