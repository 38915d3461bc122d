"""Translate OpenAI responses to chat messages and back; stateless."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from dora_pipe.producers.sessions.calls import (
    NEUTRAL,
    CallRequest,
    Limit,
    Refused,
    Sampled,
    add_call,
    caller_of,
    decoded,
    messages_of,
    text_of,
    tools_of,
    written,
)


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Supported keys of a body."""

    input: str | list[dict[str, Any]]
    model: str = ""
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_output_tokens: Limit | None = None
    stream: bool | None = None
    text: dict[str, Any] | None = None
    user: str | None = None


def read(body: bytes, caller: str = "") -> tuple[ResponsesRequest, CallRequest]:
    """Parse a request. Raises Refused."""
    request, settings = decoded(body, ResponsesRequest)
    for key, value in (request.text or {}).items():
        name = "response_format" if key == "format" else key
        if value is not None and value != NEUTRAL.get(name):
            settings[name] = value
    call_request = CallRequest(
        api="responses",
        messages=messages_of(list(chat_messages(request))),
        tools=tools_of([*map(_tool, request.tools or ())], request.tool_choice),
        max_tokens=request.max_output_tokens,
        settings=settings,
        caller=caller_of(caller, request.user),
    )
    return request, call_request


def chat_messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Yield chat messages, merging the assistant's consecutive items. Raises Refused."""
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    for spoken, items in itertools.groupby(request.input, key=_is_spoken):
        if spoken:
            yield _assistant(items)
            continue
        for item in items:
            if item.get("type") == "function_call_output":
                content = text_of(item.get("output", ""), "input")
                yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
            else:
                yield {
                    "role": item.get("role"),
                    "content": text_of(item.get("content", ""), "input"),
                }


def _is_spoken(item: Mapping[str, Any]) -> bool:
    match item.get("type", "message"):
        case "message":
            return item.get("role") == "assistant"
        case "function_call" | "reasoning":
            return True
        case "function_call_output":
            return False
        case kind:
            raise Refused(400, "unsupported", f"input: an item of type `{kind}` is not supported")


def _assistant(items: Iterator[Mapping[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for item in items:
        match item.get("type", "message"):
            case "message":
                message["content"] += text_of(item.get("content", ""), "input")
            case "function_call":
                add_call(message, item.get("call_id"), item.get("name"), item.get("arguments"))
    return message


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        return {"type": tool.get("type")}  # run by OpenAI
    fields = ("name", "description", "parameters")
    function = {key: tool[key] for key in fields if tool.get(key) is not None}
    return {"type": "function", "function": function}


def answer(
    request: ResponsesRequest, sampled: Sampled, *, number: int, created_s: int
) -> dict[str, Any]:
    """Return the response."""
    cut = sampled.finish == "length"
    status = "incomplete" if cut else "completed"
    prompt, spoken = sampled.prompt_tokens, len(sampled.token_ids)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": created_s,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "instructions": request.instructions,
        "metadata": {},
        "model": request.model,
        "output": _output(sampled.turn.message(), number, status),
        "parallel_tool_calls": True,
        "temperature": None,
        "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
        "tools": request.tools or [],
        "top_p": None,
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": spoken,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + spoken,
        },
    }


def _output(message: dict[str, Any], number: int, status: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        thoughts = [{"type": "reasoning_text", "text": message["reasoning_content"]}]
        items.append(
            {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": thoughts}
        )
    calls = message.get("tool_calls", ())
    if message["content"] or not calls:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        head = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": status}
        items.append({**head, "content": [text]})
    for index, call in enumerate(calls):
        function = call["function"]
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{number}_{index}",
                "call_id": call["id"],
                "name": function["name"],
                "arguments": written(function["arguments"]),
                "status": status,
            }
        )
    return items


def events(answer: dict[str, Any]) -> list[tuple[str, Any]]:
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    events = [_event("created", response=begun), _event("in_progress", response=begun)]
    for index, item in enumerate(answer["output"]):
        events += _item_events(index, item)
    events.append(_event(answer["status"], response=answer))
    numbered = [{**event, "sequence_number": index} for index, event in enumerate(events)]
    return [(event["type"], event) for event in numbered]


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    location = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        text = item["content"][0]["text"]
        part = {**location, "content_index": 0}
        yield _event("output_item.added", output_index=index, item={**item, "content": []})
        yield _event("content_part.added", **part, part={**item["content"][0], "text": ""})
        yield _event("output_text.delta", **part, delta=text, logprobs=[])
        yield _event("output_text.done", **part, text=text, logprobs=[])
        yield _event("content_part.done", **part, part=item["content"][0])
    elif item["type"] == "function_call":
        yield _event("output_item.added", output_index=index, item={**item, "arguments": ""})
        yield _event("function_call_arguments.delta", **location, delta=item["arguments"])
        done = {"name": item["name"], "arguments": item["arguments"]}
        yield _event("function_call_arguments.done", **location, **done)
    else:
        yield _event("output_item.added", output_index=index, item=item)
    yield _event("output_item.done", output_index=index, item=item)


def _event(name: str, /, **values: Any) -> dict[str, Any]:
    return {"type": f"response.{name}", **values}
