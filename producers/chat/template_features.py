"""Features of a chat template, detected by rendering small conversations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from dora_pipe.core.errors import PolicyError, TaskError
from dora_pipe.producers.chat.template import Template
from dora_pipe.producers.chat.tokenizer import THINK
from dora_pipe.producers.tasks.messages import ROLES, text_of
from dora_pipe.producers.tasks.task import Message

_USER: Final = {"role": "user", "content": "quorl"}
_ANSWER: Final = {"role": "assistant", "content": "blint"}
_LAST: Final = {"role": "user", "content": "vexan"}

PROBE_TOOL: Final = {
    "type": "function",
    "function": {
        "name": "zamble",
        "description": "Zambles.",
        "parameters": {
            "type": "object",
            "properties": {"wug": {"type": "string", "description": "What."}},
            "required": ["wug"],
        },
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateFeatures:
    """Features of a template.

    Example: Qwen2.5's is ``TemplateFeatures(system=True, tools=True, calls=True, results=True)``.
    """

    content: Literal["text", "parts"] = "text"
    arguments: Literal["object", "text"] = "object"
    """Arguments of calls: objects, or JSON strings."""
    empty: Literal["text", "none"] = "text"
    """Content of a turn with calls only: an empty string, or None."""
    reasoning: str = ""
    """Key of an assistant's thoughts; empty if the template ignores them."""
    system: bool = False
    developer: bool = False
    """Whether a developer role exists; otherwise it becomes system."""
    tools: bool = False
    calls: bool = False
    results: bool = False
    parallel: bool = False
    thinking: Literal["free", "always", "never"] = "free"
    """Whether a turn begins with thoughts."""

    def messages(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return messages in the template's form. Raises TaskError for unsupported messages."""
        return [self._message(message) for message in messages]

    def _message(self, message: Message) -> dict[str, Any]:
        role, content = message.get("role"), text_of(message.get("content"))
        if role not in ROLES:
            raise TaskError(f"a message has the role {role!r}", hint=f"roles: {', '.join(ROLES)}")
        if role == "developer" and not self.developer:
            role = "system"
        if role == "system" and not self.system:
            raise TaskError("the model's chat template ignores system messages")
        if role == "tool" and not self.results:
            raise TaskError("the model's chat template ignores tool results")
        converted = {
            key: value
            for key, value in message.items()
            if key not in ("content", "reasoning_content", "tool_calls")
        }
        converted["role"] = role
        converted["content"] = content if self.content == "text" else _parts(content)
        if message.get("reasoning_content") and self.reasoning:
            converted[self.reasoning] = message["reasoning_content"]
        if message.get("tool_calls"):
            if not self.calls:
                raise TaskError("the model's chat template ignores tool calls")
            converted["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
            if not content and self.empty == "none":
                converted["content"] = None
        return converted

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = dict(call["function"])
        if self.arguments == "text":
            function["arguments"] = _json(function["arguments"])
        return {"type": "function", "id": call.get("id") or "call00000", "function": function}


def learn(template: Template, tool_template: Template) -> TemplateFeatures:
    """Detect the features of a template and its tool template. Raises PolicyError if it ignores
    user messages."""
    features = next(
        (
            features
            for features in (TemplateFeatures(), TemplateFeatures(content="parts"))
            if _shows(template, features, [_USER], "quorl")
            and _shows(template, features, _pair(), "blint")
        ),
        None,
    )
    if features is None:
        raise PolicyError("the chat template ignores user messages or answers")
    both = replace(features, system=True, developer=True)
    system, developer = (
        _shows(template, both, [{"role": role, "content": "molpy"}, _USER], "molpy")
        for role in ("system", "developer")
    )
    features = replace(features, system=system, developer=developer)
    if _begins_thoughts(template, features):
        features = replace(features, thinking="always")
    return _with_tools(tool_template, _with_reasoning(template, features))


def _pair() -> list[Message]:
    return [_USER, _ANSWER, _LAST]


def _with_reasoning(template: Template, features: TemplateFeatures) -> TemplateFeatures:
    for key in ("reasoning_content", "reasoning", "thinking"):
        candidate = replace(features, reasoning=key)
        if _shows(template, candidate, [_USER, _thoughtful(_ANSWER)], "druff"):
            always = features.thinking == "always"
            return (
                candidate if always else replace(candidate, thinking=_thinking(template, candidate))
            )
    return features


def _begins_thoughts(template: Template, features: TemplateFeatures) -> bool:
    """Report whether the generation prompt opens thoughts without closing them."""
    asked = template.render(features.messages([_USER]), (), generate=True)
    begin, end = (asked.rfind(mark) for mark in THINK)
    return begin > max(end, asked.rindex("quorl"))


def _thoughtful(message: Message) -> Message:
    return {**message, "reasoning_content": "druff"}


def _thinking(template: Template, features: TemplateFeatures) -> Literal["free", "always", "never"]:
    asked = template.render(features.messages([_USER]), (), generate=True)
    turns = (_ANSWER, _thoughtful(_ANSWER))
    without, with_ = (
        template.render(features.messages([_USER, turn]), (), generate=False).startswith(asked)
        for turn in turns
    )
    if with_ == without:
        return "free"
    return "always" if with_ else "never"


def _with_tools(template: Template, features: TemplateFeatures) -> TemplateFeatures:
    shown = _shows(template, features, [_USER], "zamble", tools=[PROBE_TOOL])
    features = replace(features, tools=shown)
    turn = {"role": "assistant", "content": "", "tool_calls": [call("zamble", "froom")]}
    calling: list[Message] = [_USER, turn]
    result = {"role": "tool", "content": "twisp", "name": "zamble", "tool_call_id": "call00000"}
    tools = [PROBE_TOOL] if shown else []
    for as_object, as_text in itertools.product((True, False), (True, False)):
        candidate = replace(
            features,
            arguments="object" if as_object else "text",
            empty="text" if as_text else "none",
            calls=True,
            results=True,
        )
        if not _shows(template, candidate, calling, "zamble", "froom", tools=tools):
            continue
        several = [call("zamble", "froom"), call("zamble", "grent", 1)]
        both: list[Message] = [_USER, {**turn, "tool_calls": several}]
        return replace(
            candidate,
            results=_shows(template, candidate, [*calling, result], "twisp", tools=tools),
            parallel=_shows(template, candidate, both, "froom", "grent", tools=tools),
        )
    return features


def call(name: str, wug: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": {"wug": wug}}
    return {"type": "function", "id": f"call{number:05}", "function": function}


def _shows(
    template: Template,
    features: TemplateFeatures,
    messages: Sequence[Message],
    *words: str,
    tools: Sequence[Mapping[str, Any]] = (),
) -> bool:
    try:
        text = template.render(features.messages(messages), tools, generate=False)
    except TaskError:
        return False
    return all(word in text for word in words)


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
