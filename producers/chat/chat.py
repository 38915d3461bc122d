"""Prompts, parsed turns and bridges of a model's chat template.

A conversation is its rendered prompt, then turns as sampled, each followed by template tokens. A
typed renderer replaces a template that rewrites its history.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from dora_pipe.core.errors import ConfigError, PolicyError, TaskError
from dora_pipe.core.system.own_code import source_sha256
from dora_pipe.producers.chat.parsers import PARSERS, Parser, none, open_parser
from dora_pipe.producers.chat.proof import bridges_flaw, first_flaw, joined
from dora_pipe.producers.chat.safe_text import SafeText
from dora_pipe.producers.chat.template import (
    Template,
    find_templates,
    special_tokens,
    template_text,
)
from dora_pipe.producers.chat.template_features import learn
from dora_pipe.producers.chat.template_renderer import TemplateRenderer, Tools, closers
from dora_pipe.producers.chat.tokenizer import Tokenizer
from dora_pipe.producers.chat.typed_renderer import TypedRenderer, disagreement, family_of
from dora_pipe.producers.tasks.task import Message, Turn

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """Options of a chat, from the keys of [task]."""

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    renderer: str = "auto"
    tool_parser: str = "auto"
    rewritten_history: Literal["refuse", "keep"] = "refuse"
    parse: bool = False
    """Parse control tokens in contents (`task.special_tokens`)."""
    directory: str = ""
    now_ns: int = 0
    """Time that templates see as now."""


class Chat:
    """Chat template of a model."""

    def __init__(
        self,
        template_renderer: TemplateRenderer,
        typed: TypedRenderer | None,
        parser: Parser,
        *,
        digest: str,
        flaw: str,
        hidden: frozenset[int],
    ) -> None:
        self.template_renderer = template_renderer
        self._typed = typed
        self._parser = parser
        self.digest = digest
        """sha256 of everything that determines token ids and parsing of turns."""
        self.flaw = flaw
        """Reason why only single turns work; empty if several work."""
        stops = (
            template_renderer.stop_ids
            if typed is None
            else template_renderer.stop_ids | typed.stop_ids
        )
        self.stop_ids = tuple(sorted(stops))
        self._hidden = hidden | stops

    @classmethod
    def open(cls, assets: Path, tokenizer: Tokenizer, options: ChatOptions) -> Chat:
        """Verify the bridges and choose a renderer. Raises ConfigError, or PolicyError for a
        model without a template."""
        template_renderer, texts = _template_renderer(assets, tokenizer, options)
        flaw = first_flaw(template_renderer, template_renderer.features)
        typed = _typed(template_renderer, tokenizer, options, flaw)
        if typed is not None:
            flaw = ""
        elif flaw and options.rewritten_history == "keep":
            flaw = bridges_flaw(template_renderer, template_renderer.features)
        name, parser = open_parser(options.tool_parser, template_renderer, options.directory)
        if (
            not name
            and template_renderer.features.calls
            and typed is None
            and options.renderer == "auto"
        ):
            typed = family_of(template_renderer, tokenizer.backend, options.kwargs)
        fields = {
            "template": dict(texts),
            "kwargs": dict(options.kwargs),
            "renderer": "template" if typed is None else f"{typed.name} {typed.version}",
            "parser": f"{name} {source_sha256(name)}" if ":" in name else name,
            "special_tokens": "parse" if options.parse else "text",
        }
        digest = hashlib.sha256(
            json.dumps(fields, sort_keys=True, default=str).encode()
        ).hexdigest()
        hidden = tokenizer.hidden
        return cls(template_renderer, typed, parser, digest=digest, flaw=flaw, hidden=hidden)

    @property
    def calls_unread(self) -> bool:
        """Report whether no parser reads the tool calls of this template."""
        return self._parser is none and self._typed is None

    @property
    def renderer(self) -> str:
        """Name of the renderer: `template`, or the family of a typed renderer."""
        return "template" if self._typed is None else self._typed.name

    def start(self, messages: Sequence[Message], tools: Tools = ()) -> Conversation:
        """Return a conversation with its rendered prompt. Raises TaskError if the template rejects
        it."""
        if tools and self._typed is None and not self.template_renderer.features.tools:
            raise TaskError("the model's chat template ignores tools")
        prompt_ids = self.renders.ids(messages, tools, generate=True)
        return Conversation(self, prompt_ids, messages, tools)

    def training_ids(
        self, messages: Sequence[Message], tools: Tools = ()
    ) -> tuple[list[int], list[int]]:
        """Return token ids and a mask: 1 for tokens of the assistant, including the token that
        ends a turn. Raises TaskError."""
        if not any(message.get("role") == "assistant" for message in messages):
            raise TaskError("the conversation has no assistant turn")
        ids, ends = joined(self.renders, messages, tools)
        mask: list[int] = []
        for end, index in ends:
            spoken = index >= 0 and messages[index]["role"] == "assistant"
            mask += [int(spoken)] * (end - len(mask))
        return ids, mask

    def check(self, *, several_turns: bool, tools: bool = False) -> None:
        """Raise ConfigError if several turns have no bridge, or tools have no parser."""
        if several_turns and self.flaw:
            raise ConfigError(
                f"the chat template has no bridge between turns: {self.flaw}",
                hint='task.rewritten_history = "keep" keeps the sampled text;'
                " task.renderer selects a family of the package renderers",
            )
        if tools and self.calls_unread:
            raise ConfigError(
                "the task has tools, but no parser for this chat template's calls",
                hint=f"task.tool_parser: {', '.join(PARSERS)}, or module:function of your own",
            )

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, without hidden tokens and ends of turns."""
        return self.template_renderer.safe.text(
            [token_id for token_id in ids if token_id not in self._hidden]
        )

    def parse(self, ids: Sequence[int], before: Sequence[int], tools: Tools) -> Turn:
        """Parse a sampled turn that follows the ids `before`."""
        if self._typed is not None:
            return self._typed.parse(ids, before, tools)
        text = self.text(ids)
        if self.template_renderer.features.thinking == "always" and "</think>" not in text:
            text = "<think>" + text  # The prompt opened the thoughts.
        return self._parser(text, tools)

    def bridge(
        self,
        history: Sequence[Message],
        turn: Message,
        new: Sequence[Message],
        tools: Tools,
        **ids: Any,
    ) -> list[int]:
        """Return the ids that follow a turn; the template handles turns that a typed renderer
        rejects. Raises TaskError."""
        if self._typed is not None:
            try:
                return self._typed.bridge(history, turn, new, tools, **ids)
            except TaskError as error:
                LOG.debug("template bridge: %s", error)
        return self.template_renderer.bridge(history, turn, new, tools, **ids)

    @property
    def renders(self) -> TemplateRenderer | TypedRenderer:
        return self.template_renderer if self._typed is None else self._typed


class Conversation:
    """A conversation: `prompt_ids`, then `say` and `answered` for each turn."""

    def __init__(
        self, chat: Chat, prompt_ids: list[int], messages: Sequence[Message], tools: Tools
    ) -> None:
        self._chat = chat
        self._tools = tools
        self._ids = list(prompt_ids)
        self._messages = [dict(message) for message in messages]
        self._sampled: Sequence[int] = ()
        self.prompt_ids = prompt_ids
        self.turns = 0
        self.text = ""
        """Text of the last turn."""
        self.reasoning = ""
        """Thoughts of the last turn."""

    def say(self, ids: Sequence[int]) -> Turn:
        """Parse a sampled turn; each of its calls gets an id."""
        turn = self._chat.parse(ids, self._ids, self._tools)
        start = sum(len(message.get("tool_calls", ())) for message in self._messages)
        calls = [
            call if call.id else msgspec.structs.replace(call, id=f"call{start + index:05}")
            for index, call in enumerate(turn.tool_calls)
        ]
        turn = msgspec.structs.replace(turn, tool_calls=tuple(calls))
        self._sampled = ids
        self._messages.append(turn.message())
        self.turns += 1
        self.text, self.reasoning = turn.text, turn.reasoning
        return turn

    def answered(self, new: Sequence[Message], *, go_on: bool = True) -> list[int]:
        """Append the ids of the answering messages and, with `go_on`, of the next turn's
        opening. Raises TaskError."""
        bridge = self.bridge(new, go_on=go_on)
        self._ids += [*self._sampled, *bridge]
        self._messages += [dict(message) for message in new]
        return bridge

    def bridge(self, new: Sequence[Message], *, go_on: bool = True) -> list[int]:
        """Return the ids of `answered` without changing the conversation. Raises TaskError."""
        if not (new or go_on):
            return []
        return self._chat.bridge(
            self._messages[:-1],
            self._messages[-1],
            new,
            self._tools,
            before=self._ids,
            sampled=self._sampled,
            generate=go_on,
        )

    def messages(self) -> tuple[dict[str, Any], ...]:
        return tuple(self._messages)


def _template_renderer(
    assets: Path, tokenizer: Tokenizer, options: ChatOptions
) -> tuple[TemplateRenderer, Mapping[str, str]]:
    templates = find_templates(assets)
    if not templates:
        raise PolicyError(
            "messages need a chat template, and the model has none",
            hint="set model.chat_template = FILE",
        )
    values = {**special_tokens(assets), **options.kwargs}
    plain, tooled = (
        Template(template_text(templates, tools=tools), values=values, now_ns=options.now_ns)
        for tools in (False, True)
    )
    features = learn(plain, tooled)
    safe = SafeText(tokenizer.backend, tokenizer.control, parse=options.parse)
    written = closers(tooled, features, safe)
    template_renderer = TemplateRenderer(
        plain=plain,
        tooled=tooled,
        features=features,
        safe=safe,
        stop_ids=written | frozenset(tokenizer.stop_ids),
        closers=written,
    )
    return template_renderer, templates


def _typed(
    template_renderer: TemplateRenderer, tokenizer: Tokenizer, options: ChatOptions, flaw: str
) -> TypedRenderer | None:
    if options.renderer == "template" or (options.renderer == "auto" and not flaw):
        return None
    if options.renderer == "auto":
        return family_of(template_renderer, tokenizer.backend, options.kwargs)
    renderer = TypedRenderer(
        options.renderer, template_renderer.safe, tokenizer.backend, kwargs=options.kwargs
    )
    other = disagreement(renderer, template_renderer)
    if other:
        LOG.warning("%s; using task.renderer as configured", other)
    return renderer
