"""A conversation as data sets have it, and what of it is the prompt and what the answer.

It decides which forms are known: a list of messages (`role`, `content`), ShareGPT's (`from`,
`value`), and both as JSON in a string where a string may be one. Tables give every message all keys
of any message, so keys that hold nothing are dropped.

The prompt ends before the last message of an assistant that ends the conversation: that one is the
answer of the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
"""ShareGPT's names of speakers."""

SYSTEM: Final = ("system", "developer")

Conversation = list[dict[str, Any]]


def conversation_of(value: object, *, in_text: bool = False) -> Conversation | None:
    """The messages of a column's value, with `in_text` also those that are written as JSON; None
    where it is text, or nothing that is known.

    Raises TaskError naming the message that is none.
    """
    if isinstance(value, str) and in_text:
        value = _listed(value)
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        return None
    if not all(isinstance(one, Mapping) for one in value):
        return None
    return [_message(place, one) for place, one in enumerate(value)]


def split_answer(messages: Conversation) -> tuple[Conversation, dict[str, Any] | None]:
    """What is asked, and the assistant's message that ends the conversation, if one does."""
    if len(messages) > 1 and messages[-1]["role"] == "assistant":
        return messages[:-1], messages[-1]
    return messages, None


def with_system(messages: Conversation, text: str) -> Conversation:
    """With this system message in front, unless there is one."""
    if not text or messages[0]["role"] in SYSTEM:
        return messages
    return [{"role": "system", "content": text}, *messages]


def text_of(message: Mapping[str, Any]) -> str:
    """The text of a message, its parts joined."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _listed(text: str) -> object:
    """A list that is written as JSON; any other text is text."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return None


def _message(place: int, said: Mapping[str, Any]) -> dict[str, Any]:
    message: dict[str, Any] = _filled(said)
    if "role" not in message and "from" in message:
        speaker = message.pop("from")
        role = ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise TaskError(
                f"message {place} is from `{speaker}`", hint=f"known are {', '.join(ROLES)}"
            )
        message = {"role": role, "content": message.pop("value", ""), **message}
    if not isinstance(message.get("role"), str):
        raise TaskError(f"message {place} has no `role`", hint=f"it has {', '.join(said)}")
    content = message.setdefault("content", "")
    if not isinstance(content, str | list):
        raise TaskError(f"message {place}: its content is {type(content).__name__}, not text")
    return message


def _filled(value: Any) -> Any:
    """Without keys that hold nothing, at any depth."""
    if isinstance(value, Mapping):
        return {key: _filled(inner) for key, inner in value.items() if inner is not None}
    return [_filled(inner) for inner in value] if isinstance(value, list) else value
