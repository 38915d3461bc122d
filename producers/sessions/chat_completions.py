"""Chat completions of OpenAI and vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from dora_pipe.producers.sessions.calls import (
    CallRequest,
    Choices,
    Limit,
    Refused,
    Sampled,
    Stop,
    Stops,
    caller_of,
    decoded,
    messages_of,
    stops_of,
    template_of,
    tools_of,
    written,
)

FINISH: Final = {"stop": "stop", "length": "length"}


class ChatRequest(msgspec.Struct, kw_only=True):
    """Supported keys of a body."""

    messages: list[dict[str, Any]]
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None


_OF_MESSAGES: Final = ("audio", "function_call", "partial", "prefix")
"""Message keys that chat templates do not render."""


def read(body: bytes, caller: str = "") -> tuple[ChatRequest, CallRequest]:
    """Parse a request. Raises Refused."""
    request, settings = decoded(body, ChatRequest)
    for index, message in enumerate(request.messages):
        for key in _OF_MESSAGES:
            if message.get(key):
                raise Refused(400, "unsupported", f"messages[{index}].{key} is not supported")
    limits = (request.max_tokens, request.max_completion_tokens)
    call_request = CallRequest(
        api="chat",
        messages=messages_of(request.messages),
        tools=tools_of(request.tools, request.tool_choice),
        max_tokens=min(filter(None, limits), default=None),
        choices=request.n or 1,
        stop=stops_of(request.stop),
        settings=settings,
        template=template_of(request.chat_template_kwargs, request.enable_thinking),
        caller=caller_of(caller, request.user),
    )
    return request, call_request


def answer(
    request: ChatRequest,
    choices: Sequence[Sampled],
    *,
    answer_id: str,
    created_s: int,
    pieces: Sequence[Sequence[str]],
    prompt_ids: Sequence[int],
) -> dict[str, Any]:
    """Return the answer; `pieces` are token texts for log-probs."""
    completion: dict[str, Any] = {
        "id": answer_id,
        "object": "chat.completion",
        "created": created_s,
        "model": request.model,
        "choices": [
            _choice(request, index, choice, pieces[index] if pieces else ())
            for index, choice in enumerate(choices)
        ],
        "usage": usage(choices),
    }
    if request.return_token_ids:
        completion["prompt_token_ids"] = list(prompt_ids)
    return completion


def events(request: ChatRequest, answer: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    head = {key: answer[key] for key in ("id", "created", "model")}
    head["object"] = "chat.completion.chunk"
    for choice in answer["choices"]:
        delta = {**choice["message"]}
        calls = delta.pop("tool_calls", [])
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        rest = {key: choice[key] for key in ("index", "logprobs", "token_ids") if key in choice}
        yield "", {**head, "choices": [{**rest, "delta": delta, "finish_reason": None}]}
        last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
        yield "", {**head, "choices": [last]}
    if (request.stream_options or {}).get("include_usage"):
        yield "", {**head, "choices": [], "usage": answer["usage"]}
    yield "", "[DONE]"


def usage(choices: Sequence[Sampled]) -> dict[str, int]:
    prompt = choices[0].prompt_tokens
    sampled = sum(len(choice.token_ids) for choice in choices)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _choice(
    request: ChatRequest, index: int, sampled: Sampled, pieces: Sequence[str]
) -> dict[str, Any]:
    message = sampled.turn.message()
    for call in message.get("tool_calls", ()):
        function = call["function"]
        function["arguments"] = written(function["arguments"])
    if "tool_calls" in message and not message["content"]:
        message["content"] = None
    finish = FINISH.get(sampled.finish, "stop")
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "logprobs": None,
        "finish_reason": "tool_calls" if "tool_calls" in message and finish == "stop" else finish,
    }
    if request.logprobs:
        pairs = zip(pieces, sampled.logprobs, strict=True)
        choice["logprobs"] = {"content": [_logprob(text, value) for text, value in pairs]}
    if request.return_token_ids:
        choice["token_ids"] = list(sampled.token_ids)
    return choice


def _logprob(text: str, value: float) -> dict[str, Any]:
    return {
        "token": text,
        "logprob": value,
        "bytes": list(text.encode("utf-8", "replace")),
        "top_logprobs": [],
    }
