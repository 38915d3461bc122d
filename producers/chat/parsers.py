"""Parsers of sampled turns: thoughts, text and tool calls by model family.

Invalid calls keep their text and the reason.
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from dora_pipe.core.errors import ConfigError, TaskError
from dora_pipe.core.system.own_code import importable, load_attribute, nearest
from dora_pipe.producers.chat.template_features import PROBE_TOOL, call
from dora_pipe.producers.chat.template_renderer import TemplateRenderer, Tools
from dora_pipe.producers.chat.tokenizer import THINK
from dora_pipe.producers.tasks.task import ToolCall, Turn
from dora_pipe.producers.tasks.values import escaped

Parser = Callable[[str, Tools], Turn]


def split_thoughts(text: str) -> tuple[str, str]:
    """Return (thoughts, text after them)."""
    begin, end = THINK
    if end in text:
        thoughts, _, answer = text.partition(end)
        return thoughts.partition(begin)[2].strip() or thoughts.strip(), answer
    if text.lstrip().startswith(begin):  # Unfinished thoughts.
        return text.partition(begin)[2].strip(), ""
    return "", text


def none(text: str, tools: Tools) -> Turn:
    del tools
    thoughts, answer = split_thoughts(text)
    return Turn(text=answer.strip(), reasoning=thoughts)


def _blocks(
    begin: str, end: str, read_call: Callable[[str, Tools], list[ToolCall]]
) -> Callable[[str, Tools], Turn]:
    block = re.compile(f"{re.escape(begin)}(.*?)({re.escape(end)}|$)", re.DOTALL)

    def parse(text: str, tools: Tools) -> Turn:
        thoughts, answer = split_thoughts(text)
        calls: list[ToolCall] = []
        for inner, closed in block.findall(answer):
            calls += read_call(inner, tools) if closed else [_bad(begin + inner, f"no {end}")]
        text = block.sub("", answer).strip()
        return Turn(text=text, reasoning=thoughts, tool_calls=tuple(calls))

    return parse


def _loaded(text: str) -> Any:
    """Parse the model's JSON; lone surrogates, NaN and infinities keep their written form. Raises
    ValueError."""
    return escaped(json.loads(text, parse_constant=str, parse_float=_finite))


def _finite(text: str) -> float | str:
    number = float(text)
    return number if math.isfinite(number) else text


def _bad(raw: str, why: str, name: str = "") -> ToolCall:
    return ToolCall(name=name, error=why, raw=raw)


def _tool_call(name: Any, arguments: Any, raw: str) -> ToolCall:
    if not isinstance(name, str) or not name:
        return _bad(raw, "a call without a name")
    if isinstance(arguments, str):
        try:
            arguments = _loaded(arguments)
        except ValueError:
            return _bad(raw, "arguments are not JSON", name)
    if not isinstance(arguments, dict):
        return _bad(raw, "arguments are not an object", name)
    return ToolCall(name=name, arguments=arguments)


def _json_call(inner: str, tools: Tools) -> list[ToolCall]:
    """``{"name": "add", "arguments": {"a": 1}}``"""
    del tools
    raw = f"<tool_call>{inner}</tool_call>"
    try:
        value = _loaded(inner)
    except ValueError as error:
        return [_bad(raw, f"no JSON: {error}")]
    if not isinstance(value, dict):
        return [_bad(raw, "a call is not an object")]
    return [_tool_call(value.get("name"), value.get("arguments", {}), raw)]


_FUNCTION: Final = re.compile(r"\s*<function=([^>\n]+)>(.*?)(?:</function>)?\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


def _xml_call(inner: str, tools: Tools) -> list[ToolCall]:
    """``<function=add><parameter=a>1</parameter></function>``"""
    match = _FUNCTION.fullmatch(inner)
    if match is None:
        return [_bad(f"<tool_call>{inner}</tool_call>", "no <function=...>")]
    name, body = match[1].strip(), match[2]
    return [_typed(name, _PARAMETER.findall(body), tools)]


_PAIR: Final = re.compile(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)


def _glm_call(inner: str, tools: Tools) -> list[ToolCall]:
    """``add<arg_key>a</arg_key><arg_value>1</arg_value>``"""
    name = inner.partition("<arg_key>")[0].strip()
    if not name or "\n" in name or "{" in name:
        return [_bad(f"<tool_call>{inner}</tool_call>", "a call without a name")]
    return [_typed(name, [(key.strip(), value) for key, value in _PAIR.findall(inner)], tools)]


def _typed(name: str, pairs: Sequence[tuple[str, str]], tools: Tools) -> ToolCall:
    """Convert plain-text values by the tool's schema, else as JSON or text."""
    kinds = _properties(name, tools)
    return ToolCall(
        name=name,
        arguments={key: _value(value, kinds.get(key, {}).get("type")) for key, value in pairs},
    )


def _properties(name: str, tools: Tools) -> Mapping[str, Any]:
    for tool in tools:
        function = tool["function"]
        if function.get("name") == name:
            properties = function.get("parameters", {}).get("properties", {})
            return properties if isinstance(properties, Mapping) else {}
    return {}


def _value(text: str, kind: Any) -> Any:
    if kind == "string":
        return text
    try:
        return _loaded(text)
    except ValueError:
        return text


def _python_calls(inner: str, tools: Tools) -> list[ToolCall]:
    """``[add(a=1), add(a=2)]``"""
    del tools
    raw = f"<|tool_call_start|>{inner}<|tool_call_end|>"
    try:
        tree = ast.parse(inner.strip(), mode="eval").body
        nodes = tree.elts if isinstance(tree, ast.List) else [tree]
        return [_python_call(node, raw) for node in nodes]
    except (TypeError, ValueError, SyntaxError, RecursionError, MemoryError) as error:
        return [_bad(raw, f"no call: {error}")]


def _python_call(node: ast.expr, raw: str) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args or not all(item.arg for item in node.keywords):
        raise ValueError("a call has a name and named arguments")
    arguments = {str(item.arg): ast.literal_eval(item.value) for item in node.keywords}
    return _tool_call(ast.unparse(node.func), json.dumps(arguments), raw)


def _llama(text: str, tools: Tools) -> Turn:
    """``{"name": "add", "parameters": {"a": 1}}`` as the entire turn."""
    del tools
    thoughts, answer = split_thoughts(text)
    body = answer.replace("<|python_tag|>", "").strip()
    if not body.startswith("{") or '"name"' not in body:
        return Turn(text=body, reasoning=thoughts)
    try:
        value = _loaded(body)
    except ValueError as error:
        call = _bad(body, f"no JSON: {error}")
    else:
        call = _tool_call(
            value.get("name"), value.get("parameters", value.get("arguments", {})), body
        )
    return Turn(text="", reasoning=thoughts, tool_calls=(call,))


PARSERS: Final[Mapping[str, Parser]] = {
    "hermes": _blocks("<tool_call>", "</tool_call>", _json_call),
    "xml": _blocks("<tool_call>", "</tool_call>", _xml_call),
    "glm": _blocks("<tool_call>", "</tool_call>", _glm_call),
    "llama": _llama,
    "pythonic": _blocks("<|tool_call_start|>", "<|tool_call_end|>", _python_calls),
}


def open_parser(
    name: str, template_renderer: TemplateRenderer, directory: str
) -> tuple[str, Parser]:
    """Return (name, parser) of `task.tool_parser`; `auto` picks the format that reads the
    template's calls. Raises ConfigError."""
    if name == "auto":
        chosen = next(
            (parser for parser in PARSERS if _reads_back(PARSERS[parser], template_renderer)), ""
        )
        return chosen, PARSERS.get(chosen, none)
    if name in PARSERS:
        return name, PARSERS[name]
    if ":" not in name:
        raise ConfigError(
            f"task.tool_parser: unknown parser `{name}`",
            hint=nearest(name, PARSERS) or f"one of {', '.join(PARSERS)}, auto, module:function",
        )
    with importable(directory):
        own = load_attribute("task.tool_parser", name)

    def parse(text: str, tools: Tools) -> Turn:
        del tools
        turn = own(text)
        if not isinstance(turn, Turn):
            raise TaskError(f"task.tool_parser gave {type(turn).__name__}, not a Turn")
        return turn

    return name, parse


def _reads_back(parser: Parser, template_renderer: TemplateRenderer) -> bool:
    if not template_renderer.features.calls:
        return False
    calls = [call("zamble", "froom"), call("zamble", "gr ent", 1)]
    message: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": calls}
    if not template_renderer.features.parallel:
        message["tool_calls"] = calls[:1]
    if template_renderer.features.thinking == "always":
        message["reasoning_content"] = "druff"
    tools: list[dict[str, Any]] = [PROBE_TOOL] if template_renderer.features.tools else []
    try:
        ids = template_renderer.turn([{"role": "user", "content": "quorl"}], message, tools)
    except TaskError:
        return False
    stops = template_renderer.stop_ids
    turn = parser(
        template_renderer.safe.text([token_id for token_id in ids if token_id not in stops]), tools
    )
    read = [(call.name, call.arguments) for call in turn.tool_calls]
    expected = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]
    ]
    return read == expected
