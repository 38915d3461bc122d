"""Prompts, bridges and parsed turns by the package `renderers`.

Used where a template rewrites its history. The family is detected by equal ids, not by name.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.core.errors import ConfigError, TaskError, install_hint
from dora_pipe.producers.chat.proof import conversations
from dora_pipe.producers.chat.safe_text import MARKS, SafeText
from dora_pipe.producers.chat.template_renderer import TemplateRenderer, Tools
from dora_pipe.producers.tasks.task import Message, ToolCall, Turn

if TYPE_CHECKING:
    import tokenizers

_FAULTS: Final = (ValueError, TypeError, LookupError, AttributeError, AssertionError, RuntimeError)
"""Errors of `renderers` for a tokenizer or messages that a family does not support."""

_HARMONY: Final = "gpt-oss"


class TypedRenderer:
    """Typed renderer over a tokenizer whose data has no control tokens. Raises ConfigError for
    an unknown or unfit family."""

    def __init__(
        self, name: str, safe: SafeText, backend: tokenizers.Tokenizer, *, kwargs: Mapping[str, Any]
    ) -> None:
        if importlib.util.find_spec("renderers") is None:
            raise ConfigError(
                f"task.renderer is {name}, but `renderers` is not installed",
                hint=f"{install_hint('chat')}, or task.renderer = 'template'",
            )
        from renderers import _version, base, configs

        self.name = name
        self.version: str = _version.__version__
        self._words = _Words(safe, backend)
        self.safe = safe
        try:
            config = configs._config_class_for(name)(thinking_retention="all")
            self._renderer = base.create_renderer(self._words, config, chat_template_kwargs=kwargs)
        except _FAULTS as error:
            raise ConfigError(
                f"task.renderer = {name} cannot be used with this model: {error}",
                hint="task.renderer = auto or template selects a fitting one",
            ) from None
        self.stop_ids = frozenset(self._renderer.get_stop_token_ids())

    def ids(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> list[int]:
        """Return the token ids of a conversation; `generate` opens the model's turn. Raises
        TaskError."""
        return list(self._render(messages, tools, generate=generate).token_ids)

    def turn(self, history: Sequence[Message], message: Message, tools: Tools) -> list[int]:
        """Return the ids of a turn as sampled, including its end. Raises TaskError."""
        rendered = self._render([*history, message], tools, generate=False)
        start = len(history)
        if len(rendered.sampled_mask) != len(rendered.token_ids):
            raise TaskError(f"renderer {self.name} does not mark sampled tokens")
        kept = zip(rendered.token_ids, rendered.message_indices, rendered.sampled_mask, strict=True)
        return [token_id for token_id, message, sampled in kept if message == start and sampled]

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
        """Return the ids that follow a sampled turn with prompt `before`. Raises TaskError."""
        del history, turn, generate
        mark = self._words.mark = self.safe.mark_for(new, tools)
        try:
            bridged = self._renderer.bridge_to_next_turn(
                list(before),
                list(sampled),
                self.safe.marked(list(new), mark),
                tools=self.safe.marked(list(tools), mark, full=True) or None,
            )
        except _FAULTS as error:
            raise TaskError(f"renderer {self.name}: {error}") from None
        ids = [*before, *sampled]
        if bridged is None or bridged.token_ids[: len(ids)] != ids:
            raise TaskError(f"renderer {self.name} has no bridge after this turn")
        return list(bridged.token_ids[len(ids) :])

    def parse(self, ids: Sequence[int], before: Sequence[int], tools: Tools) -> Turn:
        try:
            parsed = self._renderer.parse_response(
                list(ids), tools=list(tools) or None, prompt_ids=list(before)
            )
        except _FAULTS as error:
            raise TaskError(f"renderer {self.name} cannot read this turn: {error}") from None
        return Turn(
            text=parsed.content,
            reasoning=parsed.reasoning_content or "",
            tool_calls=tuple(map(_call, parsed.tool_calls)),
        )

    def _render(self, messages: Sequence[Message], tools: Tools, *, generate: bool) -> Any:
        mark = self._words.mark = self.safe.mark_for(messages, tools)
        try:
            return self._renderer.render(
                self.safe.marked([dict(message) for message in messages], mark),
                tools=self.safe.marked(list(tools), mark, full=True) or None,
                add_generation_prompt=generate,
            )
        except _FAULTS as error:
            raise TaskError(f"renderer {self.name} refuses this conversation: {error}") from None


class _Words:
    name_or_path = ""
    unk_token_id = None
    eos_token_id = None

    def __init__(self, safe: SafeText, backend: tokenizers.Tokenizer) -> None:
        self._safe = safe
        self._backend = backend
        self.mark = MARKS[0]
        """Character that breaks added tokens in the current texts."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._safe.ids(text, self.mark)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self._backend.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._backend.token_to_id(tokens)
        return [self._backend.token_to_id(token) for token in tokens]


def _call(call: Any) -> ToolCall:
    name, arguments = call.name or "", call.arguments
    if str(call.status) == "ok" and isinstance(arguments, Mapping):
        return ToolCall(name=name, arguments=dict(arguments), id=call.id or "")
    error = "arguments are not an object" if str(call.status) == "ok" else str(call.status)
    return ToolCall(name=name, error=error.replace("_", " "), raw=call.raw)


def known() -> list[str]:
    """Return the families of `renderers`; empty if it is not installed."""
    if importlib.util.find_spec("renderers") is None:
        return []
    from renderers import base

    base._populate_registry()
    return sorted(set(base.RENDERER_REGISTRY) - {"default"})


def family_of(
    template_renderer: TemplateRenderer, backend: tokenizers.Tokenizer, kwargs: Mapping[str, Any]
) -> TypedRenderer | None:
    """Return the typed renderer with the ids of this template, or None."""
    for name in known():
        if name == _HARMONY and backend.token_to_id("<|channel|>") is None:
            continue  # It would download its vocabulary.
        try:
            typed = TypedRenderer(name, template_renderer.safe, backend, kwargs=kwargs)
        except ConfigError:
            continue
        if disagreement(typed, template_renderer) == "":
            return typed
    return None


def disagreement(typed: TypedRenderer, template_renderer: TemplateRenderer) -> str:
    """Describe how a typed renderer differs from a template; empty if it does not."""
    for messages, tools in _first_turns(template_renderer):
        try:
            ids = [each.ids(messages, tools, generate=True) for each in (typed, template_renderer)]
        except TaskError as error:
            return str(error)
        if ids[0] != ids[1]:
            roles = ", ".join(message["role"] for message in messages)
            return f"renderer {typed.name} writes ({roles}) differently from the chat template"
    return ""


def _first_turns(
    template_renderer: TemplateRenderer,
) -> Iterator[tuple[list[Message], list[dict[str, Any]]]]:
    for messages, tools in conversations(template_renderer.features):
        spoken = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        answered = next(index for index in spoken if "tool_calls" not in messages[index])
        yield messages[: spoken[0]], tools
        if answered != spoken[0]:
            yield messages[:answered], tools
