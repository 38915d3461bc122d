"""Translate Anthropic's messages to chat messages and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec

from dora_pipe.producers.sessions.calls import (
    CallRequest,
    Limit,
    Refused,
    Sampled,
    Stops,
    add_call,
    caller_of,
    decoded,
    messages_of,
    stops_of,
    text_of,
    tools_of,
    unsupported,
    written,
)

_ERRORS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    410: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_CHOICES: Final = {"any": "required", "tool": "tool"}


class MessagesRequest(msgspec.Struct, kw_only=True):
    """Supported keys of a body."""

    messages: list[dict[str, Any]]
    max_tokens: Limit
    model: str = ""
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    stop_sequences: Stops | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


def read(body: bytes, caller: str = "") -> tuple[MessagesRequest, CallRequest]:
    """Parse a request. Raises Refused."""
    request, settings = decoded(body, MessagesRequest)
    thinking = settings.get("thinking")
    if isinstance(thinking, Mapping) and thinking.get("type") == "disabled":
        del settings["thinking"]
    if request.messages and request.messages[-1].get("role") == "assistant":
        raise Refused(
            400,
            "unsupported",
            "a final assistant message (prefill) is not supported",
        )
    choice = (request.tool_choice or {}).get("type")
    user = (request.metadata or {}).get("user_id")
    call_request = CallRequest(
        api="messages",
        messages=messages_of(chat_messages(request)),
        tools=tools_of([*map(_tool, request.tools or ())], _CHOICES.get(str(choice), choice)),
        max_tokens=request.max_tokens,
        stop=stops_of(request.stop_sequences),
        settings=settings,
        caller=caller_of(caller, user if isinstance(user, str) else None),
    )
    return request, call_request


def chat_messages(request: MessagesRequest) -> list[dict[str, Any]]:
    """Return chat messages. Raises Refused for unsupported blocks."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": text_of(request.system, "system")})
    for index, message in enumerate(request.messages):
        content = message.get("content", "")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if message.get("role") == "assistant":
            messages.append(_assistant(blocks, f"messages[{index}]"))
        else:
            messages += _user(blocks, f"messages[{index}]")
    return messages


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type", "custom") != "custom":
        return {"type": tool["type"]}  # run by Anthropic
    function = {"name": tool.get("name"), "parameters": tool.get("input_schema", {})}
    if tool.get("description"):
        function["description"] = tool["description"]
    return {"type": "function", "function": function}


def _assistant(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                message["content"] += text
            case {"type": "thinking", "thinking": str(text)}:
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case {"type": "tool_use", "name": name, "input": arguments}:
                add_call(message, block.get("id"), name, arguments)
            case {"type": "redacted_thinking"}:
                pass
            case _:
                raise unsupported(block, where)
    return message


def _user(blocks: list[dict[str, Any]], where: str) -> Iterator[dict[str, Any]]:
    """Yield tool results, then the user's text."""
    texts: list[str] = []
    for block in blocks:
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
            case {"type": "tool_result", "tool_use_id": call}:
                content = text_of(block.get("content") or "", where)
                yield {"role": "tool", "tool_call_id": call, "content": content}
            case _:
                raise unsupported(block, where)
    if texts:
        yield {"role": "user", "content": "".join(texts)}


def answer(request: MessagesRequest, sampled: Sampled, *, number: int) -> dict[str, Any]:
    """Return the assistant's message."""
    turn = sampled.turn.message()
    content: list[dict[str, Any]] = []
    if turn.get("reasoning_content"):
        thoughts = turn["reasoning_content"]
        content.append({"type": "thinking", "thinking": thoughts, "signature": ""})
    if turn["content"]:
        content.append({"type": "text", "text": turn["content"]})
    for call in turn.get("tool_calls", ()):
        function = call["function"]
        use = {"id": call["id"], "name": function["name"], "input": function["arguments"]}
        content.append({"type": "tool_use", **use})
    reason, stop = _stopped(request, sampled, calls="tool_calls" in turn)
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": request.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": {"input_tokens": sampled.prompt_tokens, "output_tokens": len(sampled.token_ids)},
    }


def _stopped(request: MessagesRequest, sampled: Sampled, *, calls: bool) -> tuple[str, str | None]:
    if sampled.finish == "length":
        return "max_tokens", None
    if sampled.stop:
        return "stop_sequence", sampled.stop
    return "tool_use" if calls else "end_turn", None


def events(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    start = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}]
    for index, block in enumerate(answer["content"]):
        empty, deltas = _opened(block)
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [
            {"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas
        ]
        events.append({"type": "content_block_stop", "index": index})
    delta = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
    events.append({"type": "message_delta", "delta": delta, "usage": answer["usage"]})
    events.append({"type": "message_stop"})
    return [(event["type"], event) for event in events]


def _opened(block: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    match block["type"]:
        case "text":
            return {**block, "text": ""}, [{"type": "text_delta", "text": block["text"]}]
        case "thinking":
            delta = {"type": "thinking_delta", "thinking": block["thinking"]}
            return {**block, "thinking": ""}, [delta]
        case _:
            delta = {"type": "input_json_delta", "partial_json": written(block["input"])}
            return {**block, "input": {}}, [delta]


def error_type(status: int) -> str:
    return _ERRORS.get(status, "api_error")
