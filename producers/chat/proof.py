"""Verification, on generated conversations, that bridges give the ids of the whole conversation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any, Final, Protocol

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.safe_text import SafeText
from dora_pipe.producers.chat.template_features import PROBE_TOOL, TemplateFeatures, call
from dora_pipe.producers.chat.template_renderer import Tools
from dora_pipe.producers.tasks.task import Message

CONVERSATIONS: Final = 12
"""Conversations tried at the start of a run."""

_WORDS: Final = (
    "sum it up please", "42", "größer als Ω", "x = 3;\ny = [1, 2]", "日本語です", "two\n\nlines",
    'a "quoted" {brace}', "emoji 🙂 here", "tab\tinside", "it is <b>bold</b>", "π ≈ 3.14", "ok",
)  # fmt: skip


class Renderer(Protocol):
    """Interface under verification; see `template_renderer.TemplateRenderer`."""

    @property
    def safe(self) -> SafeText: ...

    def ids(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> list[int]: ...

    def turn(self, history: Sequence[Message], message: Message, tools: Tools) -> list[int]: ...

    def bridge(
        self,
        history: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Tools,
        *,
        before: Sequence[int],
        sampled: Sequence[int],
    ) -> list[int]: ...


def conversations(
    features: TemplateFeatures, *, seed: int = 0, count: int = CONVERSATIONS
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    """Yield conversations that the template supports, with their tools; each ends in a turn."""
    chance = random.Random(seed)
    for number in range(count):
        tools = features.tools and number % 3 != 0
        messages: list[Message] = []
        if features.system and number % 2:
            messages.append({"role": "system", "content": chance.choice(_WORDS)})
        for _ in range(chance.randint(1, 3)):
            messages.append({"role": "user", "content": chance.choice(_WORDS)})
            if tools and features.calls and features.results:
                for _ in range(chance.randint(0, 2)):
                    messages += _calls(features, chance)
            messages.append(_assistant_message(features, chance))
        yield messages, [PROBE_TOOL] if tools else []


def _assistant_message(features: TemplateFeatures, chance: random.Random) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": chance.choice(_WORDS)}
    often = {"free": 0.6, "always": 1.0, "never": 0.0}[features.thinking]
    if features.reasoning and chance.random() < often:
        message["reasoning_content"] = chance.choice(_WORDS)
    return message


def _calls(features: TemplateFeatures, chance: random.Random) -> Iterator[dict[str, Any]]:
    message = _assistant_message(features, chance)
    if chance.random() < 0.5 or not features.parallel:
        message["content"] = ""
    size = chance.randint(1, 3) if features.parallel else 1
    message["tool_calls"] = [call("zamble", chance.choice(_WORDS), index) for index in range(size)]
    yield message
    for index in range(size):
        content = chance.choice(_WORDS)
        result = {"role": "tool", "content": content, "name": "zamble"}
        yield {**result, "tool_call_id": f"call{index:05}"}


def flaw_of(renders: Renderer, messages: Sequence[Message], tools: Tools) -> str:
    """Return the first position where prompt, turns and bridges differ from the whole; empty if
    none."""
    try:
        ids, ends = joined(renders, messages, tools)
        all_ids = renders.ids(messages, tools, generate=False)
    except TaskError as error:
        return str(error)
    text = renders.safe.text
    if all_ids[: len(ids)] == ids or text(all_ids).startswith(text(ids)):
        return ""  # Same text, other ids at the border of prompt and turn.
    differing = next(
        (
            index
            for index, (token_id, other) in enumerate(zip(ids, all_ids, strict=False))
            if token_id != other
        ),
        min(len(ids), len(all_ids)),
    )
    number = next((name for end, name in ends if differing < end), len(messages) - 1)
    role = messages[number]["role"]
    return f"message {number + 1} of {len(messages)} ({role}) changes when later messages follow"


def joined(
    renders: Renderer, messages: Sequence[Message], tools: Tools
) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the ids of prompt, turns and bridges, and the end of each piece with its message's
    index. Raises TaskError."""
    spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    ids = renders.ids(messages[: spoken[0]], tools, generate=True)
    ends = [(len(ids), spoken[0] - 1)]
    for index, after in zip(spoken, [*spoken[1:], 0], strict=True):
        answer = messages[index]
        sampled = renders.turn(messages[:index], answer, tools)
        ids += sampled
        ends.append((len(ids), index))
        if after:
            new = messages[index + 1 : after]
            ids += renders.bridge(
                messages[:index], answer, new, tools, before=ids[: -len(sampled)], sampled=sampled
            )
            ends.append((len(ids), after - 1))
    return ids, ends


def bridges_flaw(renders: Renderer, features: TemplateFeatures) -> str:
    """Return why turns of a history-rewriting template lack a bridge; empty if they have one."""
    for messages, tools in conversations(features):
        for index, message in enumerate(messages[:-1]):
            following = messages[index + 1 :]
            end = next(x for x, later in enumerate(following) if later["role"] == "assistant")
            if message["role"] != "assistant":
                continue
            try:
                renders.bridge(
                    messages[:index], message, following[:end], tools, before=(), sampled=()
                )
            except TaskError as error:
                return str(error)
    return ""


def first_flaw(renders: Renderer, features: TemplateFeatures) -> str:
    """Return the first failure among the conversations tried at a start; empty if none."""
    for messages, tools in conversations(features):
        flaw = flaw_of(renders, messages, tools)
        if flaw:
            return flaw
    return ""
