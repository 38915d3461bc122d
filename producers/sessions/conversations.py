"""Prompts that extend earlier answers of a session.

A call that starts with an answered conversation keeps its token ids, and only the bridge is
appended (see `chat`). Other calls are rendered in full. Answers form a tree, found by a digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.chat import Chat
from dora_pipe.producers.tasks.task import Message, ToolCall, Turn

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A conversation up to a turn: `before`, `given`, `sampled`."""

    before: Answered | None
    given: array[int]
    sampled: array[int]
    message: Mapping[str, Any]
    """The turn with reasoning."""

    def prompt_ids(self) -> list[int]:
        ids: list[int] = [] if self.before is None else self.before.ids()
        ids.extend(self.given)
        return ids

    def ids(self) -> list[int]:
        parts: list[array[int]] = []
        answered: Answered | None = self
        while answered is not None:
            parts += [answered.sampled, answered.given]
            answered = answered.before
        return [token_id for part in reversed(parts) for token_id in part]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Token ids up to the model's turn."""

    ids: list[int]
    before: Answered | None
    given: array[int]
    digest: bytes
    """Digest of tools and messages."""
    tools: Tools


class Conversations:
    """Conversations of one session."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._answered: dict[bytes, Answered] = {}
        self._turns: Counter[bytes] = Counter()

    def prompt(self, messages: Sequence[Message], tools: Tools, chat: Chat | None = None) -> Prompt:
        """Return a prompt. Raises TaskError if the chat template rejects it."""
        chat = chat or self._chat
        digests = list(_digests(messages, tools))
        for index in range(len(messages) - 1, 0, -1):
            answered = self._answered.get(digests[index])
            bridge = (
                None
                if answered is None
                else _bridge(chat, answered, messages[:index], messages[index:], tools)
            )
            if answered is not None and bridge is not None:
                ids = [*answered.ids(), *bridge]
                given = array("i", bridge)
                return Prompt(
                    ids=ids, before=answered, given=given, digest=digests[-1], tools=tools
                )
        ids = chat.start(messages, tools).prompt_ids
        return Prompt(ids=ids, before=None, given=array("i", ids), digest=digests[-1], tools=tools)

    def answer(
        self, prompt: Prompt, sampled: Sequence[int], stop: Sequence[str] = ()
    ) -> tuple[Turn, str]:
        """Return the turn and the stop string that ended it. Tool call ids are unique in the
        session."""
        turn = self._chat.parse(sampled, prompt.ids, prompt.tools)
        calls = self._named(turn.tool_calls, prompt, sampled)
        text, stopped = _cut(turn.text, stop)
        turn = msgspec.structs.replace(turn, text=text, tool_calls=calls)
        message = turn.message()
        self._answered.setdefault(
            _behind(prompt.digest, message),
            Answered(
                before=prompt.before,
                given=prompt.given,
                sampled=array("i", sampled),
                message=message,
            ),
        )
        return turn, stopped

    def _named(
        self, calls: Sequence[ToolCall], prompt: Prompt, sampled: Sequence[int]
    ) -> tuple[ToolCall, ...]:
        """Add missing tool call ids, which a restarted agent gets again, whatever the order of its
        sub-agents."""
        if all(call.id for call in calls):
            return tuple(calls)
        turn = hashlib.sha256(prompt.digest + array("i", sampled).tobytes()).digest()
        again, self._turns[turn] = self._turns[turn], self._turns[turn] + 1
        return tuple(
            call if call.id else msgspec.structs.replace(call, id=_call_id(turn, again, index))
            for index, call in enumerate(calls)
        )


def _bridge(
    chat: Chat, answered: Answered, before: Sequence[Message], new: Sequence[Message], tools: Tools
) -> list[int] | None:
    """Return the ids of `new`, or None without a bridge."""
    if chat.flaw:
        return None
    try:
        return chat.bridge(
            before[:-1],
            answered.message,
            new,
            tools,
            before=answered.prompt_ids(),
            sampled=list(answered.sampled),
            generate=True,
        )
    except TaskError:
        return None


def _digests(messages: Sequence[Message], tools: Tools) -> Iterator[bytes]:
    digest = hashlib.sha256(json.dumps(tools, sort_keys=True).encode()).digest()
    yield digest
    for message in messages:
        digest = _behind(digest, message)
        yield digest


def _behind(digest: bytes, message: Message) -> bytes:
    """Add a message to a digest, without reasoning: most agents do not return it."""
    calls = [
        [call.get("id", ""), call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls", ())
    ]
    content = [message["role"], message["content"], message.get("tool_call_id", ""), calls]
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(digest + text.encode("utf-8", "surrogatepass")).digest()


def _call_id(turn: bytes, again: int, index: int) -> str:
    """Return nine characters: Mistral's templates reject other lengths."""
    digest = hashlib.sha256(turn + array("q", [again, index]).tobytes()).digest()
    return base64.b32encode(digest)[:9].decode().lower()


def _cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    places = [
        (text.find(text_stop), text_stop) for text_stop in stop if text_stop and text_stop in text
    ]
    if not places:
        return text, ""
    position, stopped = min(places)
    return text[:position], stopped
