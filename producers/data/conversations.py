"""Conversations in data sets, split into prompt and answer.

Supported forms: lists of messages (`role`, `content`), ShareGPT (`from`, `value`), and both as JSON
strings. Null keys of a message are dropped, except in call arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from dora_pipe.core.errors import TaskError

ROLES: Final[Mapping[str, str]] = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}

SYSTEM: Final = ("system", "developer")

TOOLS: Final = "tools"

NOT_SHOWN: Final = (
    *("functions", "tool_choice", "parallel_tool_calls", "chat_template_kwargs", "enable_thinking"),
    *("documents", "system", "system_prompt", "response_format", "image", "images", "videos"),
)
"""Chat columns that are ignored."""

Conversation = list[dict[str, Any]]


def conversation_of(value: object, *, in_text: bool = False) -> Conversation | None:
    """Return the messages of a value, or None for other values; `in_text` also parses JSON
    strings. Raises TaskError."""
    if isinstance(value, str) and in_text:
        value = _listed(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if not all(isinstance(message, Mapping) for message in value):
        return None
    return [_message(index, message) for index, message in enumerate(value)]


def prompt_of(
    value: object, *, chat: bool, system: str = ""
) -> tuple[str | Conversation, dict[str, Any] | None]:
    """Return the prompt of a value and its answering message.

    With `chat`, text becomes a user message, and JSON text a conversation. `system` is prepended if
    missing. Raises TaskError.
    """
    messages = conversation_of(value, in_text=True)
    if messages is None and not isinstance(value, str):
        raise TaskError(f"the prompt is {type(value).__name__}, neither text nor messages")
    if isinstance(value, str) and not chat:
        if messages is not None:
            hint = "task.chat = true reads it as messages"
            raise TaskError("the prompt is a conversation in a JSON string", hint=hint)
        return value, None
    asked, answer = split_answer(messages or [{"role": "user", "content": value}])
    return with_system(asked, system), answer


def unshown_columns(
    rows: Iterable[Mapping[str, Any]], used: Collection[str], *, tools: bool
) -> Iterator[str]:
    """Return a sentence for each chat column that the model does not see."""
    names = {name for row in rows for name, value in row.items() if value not in (None, "", [], {})}
    for name in (*NOT_SHOWN, *(() if tools else (TOOLS,))):
        if name in names and name not in used:
            meant = '; task.columns = {tools = "functions"} shows it' if name == "functions" else ""
            yield f"the model does not see the column `{name}`; only rewards read it{meant}"


def split_answer(messages: Conversation) -> tuple[Conversation, dict[str, Any] | None]:
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]
    return messages, None


def with_system(messages: Conversation, text: str) -> Conversation:
    if not text or messages[0]["role"] in SYSTEM:
        return messages
    return [{"role": "system", "content": text}, *messages]


def _listed(text: str) -> object:
    if not text.lstrip().startswith("["):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        role = ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise TaskError(
                f"message {index} is from `{speaker}`", hint=f"known are {', '.join(ROLES)}"
            )
        text = {"content": message.pop("value")} if "value" in message else {}
        message = {"role": role, **text, **message}
    if not isinstance(message.get("role"), str):
        raise TaskError(f"message {index} has no `role`", hint=f"it has {', '.join(given)}")
    if "content" not in message and not message.keys() & {"tool_calls", "reasoning_content"}:
        raise TaskError(f"message {index} has no `content`", hint=f"it has {', '.join(given)}")
    content = message.setdefault("content", "")
    if not isinstance(content, str | list):
        raise TaskError(f"message {index}: its content is {type(content).__name__}, not text")
    return message
