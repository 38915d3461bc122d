"""Prompts, bridges and turns rendered by the model's own template.

A bridge is the text from a turn's end to the model's next turn; `proof` verifies its ids.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dora_pipe.core.errors import TaskError
from dora_pipe.producers.chat.safe_text import SafeText
from dora_pipe.producers.chat.template import Template
from dora_pipe.producers.chat.template_features import TemplateFeatures, call
from dora_pipe.producers.tasks.task import Message

Tools = Sequence[dict[str, Any]]
"""Schemas in OpenAI's format; see `messages.tool_schemas`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateRenderer:
    """Renderer of a template."""

    plain: Template
    tooled: Template
    """Template for conversations with tools, usually the same."""
    features: TemplateFeatures
    safe: SafeText
    stop_ids: frozenset[int]
    closers: frozenset[int]
    """Ids that the template writes after a turn; empty if the next message's first token ends it.
    """

    def render(
        self, messages: Sequence[Message], tools: Tools, mark: str, *, generate: bool
    ) -> str:
        """Return the text of a conversation with marked data. Raises TaskError."""
        template = self.tooled if tools else self.plain
        marked = self.safe.marked(self.features.messages(messages), mark)
        return template.render(
            marked, self.safe.marked(list(tools), mark, full=True), generate=generate
        )

    def ids(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> list[int]:
        """Return the token ids of a conversation; `generate` opens the model's turn. Raises
        TaskError."""
        mark = self.safe.mark_for(messages, tools)
        return self.safe.ids(self.render(messages, tools, mark, generate=generate), mark)

    def bridge(
        self,
        history: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Tools,
        *,
        before: Sequence[int],
        sampled: Sequence[int],
        generate: bool = True,
    ) -> list[int]:
        """Return the ids that follow a sampled turn. Raises TaskError.

        Rendering omits thoughts: a template that drops earlier ones would give two histories.
        """
        del before  # Ids of the prompt; the messages already contain it.
        mark = self.safe.mark_for(history, turn, new, tools)
        earlier, answer = [_thoughtless(message) for message in history], _thoughtless(turn)
        after = self.render([*earlier, answer, *new], tools, mark, generate=generate)
        text = after[self._end_of_turn(earlier, answer, after, tools, mark) :]
        ids = self.safe.ids(text, mark)
        last = sampled[-1] if sampled else -1
        ended = last in self.stop_ids and bool(ids) and (ids[0] == last or ids[0] in self.closers)
        return ids[1:] if ended else ids

    def _end_of_turn(
        self, before: list[Message], turn: Message, after: str, tools: Tools, mark: str
    ) -> int:
        for messages, generate in ((before, False), (before, True)):
            start = self.render(messages, tools, mark, generate=generate)
            if after.startswith(start):
                match = self._stops.search(after, len(start)) if self.stop_ids else None
                if match is not None:
                    return match.start()
        spoken = self.render([*before, turn], tools, mark, generate=False)
        if not after.startswith(spoken):
            raise TaskError("the chat template rewrites earlier messages of a conversation")
        return len(spoken)

    def turn(self, history: Sequence[Message], message: Message, tools: Tools) -> list[int]:
        """Return the ids of a turn as sampled, including its end. Raises TaskError."""
        mark = self.safe.mark_for(history, message, tools)
        prompt = self.render(history, tools, mark, generate=True)
        text = self.render([*history, message], tools, mark, generate=False)
        if not text.startswith(prompt):
            raise TaskError("the generation prompt of the chat template differs from its turns")
        match = self._stops.search(text, len(prompt))
        all_ids = self.safe.ids(text[: match.end() if match else len(text)], mark)
        start = self.safe.ids(prompt, mark)
        ids = all_ids[len(start) :]
        if all_ids[: len(start)] != start:  # no model samples tokens across the border
            ids = self.safe.ids(text[len(prompt) : match.end() if match else len(text)], mark)
        return ids if match or not self.stop_ids else [*ids, min(self.stop_ids)]

    @property
    def _stops(self) -> re.Pattern[str]:
        texts = (
            self.safe.control[token_id]
            for token_id in self.stop_ids
            if token_id in self.safe.control
        )
        return re.compile("|".join(map(re.escape, texts)) or r"(?!)")


def closers(template: Template, features: TemplateFeatures, safe: SafeText) -> frozenset[int]:
    """Return the added tokens that a template writes after a turn."""
    user = {"role": "user", "content": "quorl"}
    turns: list[Message] = [{"role": "assistant", "content": "blint"}]
    if features.calls:
        turns.append({"role": "assistant", "content": "", "tool_calls": [call("zamble", "blint")]})
    behind: list[list[int]] = []
    for turn in turns:
        text = template.render(features.messages([user, turn]), (), generate=False)
        behind.append(safe.tokens(text[text.rindex("blint") :]))
    if not behind[0]:
        return frozenset()
    first = {behind[0][0]}
    # After calls, call tokens or another end token may follow.
    return frozenset(first | {ids[-1] for ids in behind[1:] if ids and not first & {*ids}})


def _thoughtless(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "reasoning_content"}
