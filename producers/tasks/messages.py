"""Normal form of chat messages, and schemas of Python functions as tools.

{"role": "assistant", "content": "", "reasoning_content": "...", "tool_calls": [
    {"type": "function", "id": "call-0", "function": {"name": "add", "arguments": {"a": 1}}}]}
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any, Final, get_type_hints

import msgspec

from dora_pipe.core.errors import TaskError
from dora_pipe.core.system.own_code import nearest
from dora_pipe.producers.tasks.task import DescribedTool, Tool

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


class NoAnswer(Exception):
    """Users' code returned an invalid value."""


def finite(what: str, value: object) -> float:
    """Return a finite float, also from numpy. Raises NoAnswer."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise NoAnswer(f"{what} is {type(value).__name__}, not a number")
    number = float(value)
    if not math.isfinite(number):
        raise NoAnswer(f"{what} is {number}")
    return number


def in_order(what: str, values: Any, count: int) -> list[Any]:
    """Return results as a list. Raises NoAnswer without order or for a wrong number."""
    if isinstance(values, str | bytes | Mapping | Set) or not hasattr(values, "__iter__"):
        raise NoAnswer(f"{what} gave {type(values).__name__}, not a number per completion")
    items = list(values)
    if len(items) != count:
        raise NoAnswer(f"{what} gave {len(items)} numbers for {count} completions")
    return items


def normal(messages: Any, where: str = "messages") -> tuple[dict[str, Any], ...]:
    """Return messages in normal form.

    Joins text parts, decodes arguments and drops keys with None. Raises NoAnswer with the position:
    `messages[3].role`.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise NoAnswer(f"{where} is {type(messages).__name__}, not a list of messages")
    if not messages:
        raise NoAnswer(f"{where} is empty")
    return tuple(_message(message, f"{where}[{index}]") for index, message in enumerate(messages))


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise NoAnswer(f"{where} is {type(message).__name__}, not a message")
    plain: dict[str, Any] = {str(k): value for k, value in message.items() if value is not None}
    role = plain.get("role")
    if role not in ROLES:
        hint = nearest(str(role), ROLES) or f"one of {', '.join(ROLES)}"
        raise NoAnswer(f"{where}.role is {role!r} ({hint})")
    calls = plain.pop("tool_calls", ())
    if calls and role != "assistant":
        raise NoAnswer(f"{where}.tool_calls: only an assistant calls tools, not `{role}`")
    if "content" not in plain and not calls and "reasoning_content" not in plain:
        raise NoAnswer(f"{where}.content is missing")
    plain["content"] = _text(plain.get("content", ""), f"{where}.content")
    if not isinstance(plain.get("reasoning_content", ""), str):
        raise NoAnswer(f"{where}.reasoning_content is not text")
    if calls:
        if isinstance(calls, str | bytes | Mapping) or not isinstance(calls, Sequence):
            raise NoAnswer(f"{where}.tool_calls is {type(calls).__name__}, not a list")
        plain["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return plain


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise NoAnswer(f"{where} is {type(content).__name__}, neither text nor parts of text")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise NoAnswer(f"{where}[{index}] is a part of type `{kind}`; only text is supported")
        texts.append(text)
    return "".join(texts)


def _call(call: Any, where: str) -> dict[str, Any]:
    """Accepts OpenAI's format, or name and arguments."""
    if not isinstance(call, Mapping):
        raise NoAnswer(f"{where} is {type(call).__name__}, not a call")
    plain = {str(key): value for key, value in call.items() if value is not None}
    function = plain.pop("function", None)
    if function is None:
        function = {key: plain.pop(key) for key in ("name", "arguments") if key in plain}
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise NoAnswer(f"{where}.function.name is not text")
    function = {key: value for key, value in function.items() if value is not None}
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments or "{}")
        except msgspec.DecodeError as error:
            raise NoAnswer(f"{where}.function.arguments: {error}") from error
    if not isinstance(arguments, Mapping | None):
        raise NoAnswer(f"{where}.function.arguments is {type(arguments).__name__}, not an object")
    function = {**function, "arguments": dict(arguments or {})}
    return {**plain, "type": plain.get("type", "function"), "function": function}


def text_of(content: Any) -> str:
    """Return the text of a content. Raises TaskError if it has none."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list | tuple):
        parts = [part.get("text") if isinstance(part, Mapping) else part for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    raise TaskError("a message's content is neither text nor text parts")


def tool_schemas(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return functions or schemas as schemas in OpenAI's format, also from JSON text. Raises
    NoAnswer."""
    if isinstance(tools, str):
        try:
            tools = msgspec.json.decode(tools or "[]")
        except msgspec.DecodeError as error:
            raise NoAnswer(f"tools: {error}") from None
    if isinstance(tools, Mapping) or not isinstance(tools or (), Sequence):
        raise NoAnswer(f"tools is {type(tools).__name__}, no list of functions or their schemas")
    schemas: list[dict[str, Any]] = []
    for index, tool in enumerate(tools or ()):
        schema = tool_schema(tool) if callable(tool) else tool
        function = schema.get("function", schema) if isinstance(schema, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise NoAnswer(f"tools[{index}] is no function and no schema with a name")
        named = schema if function is not schema else {"type": "function", "function": dict(schema)}
        schemas.append(dict(named))
    return tuple(schemas)


def tool_name(function: Tool) -> str:
    """Return a tool's name. Raises NoAnswer."""
    if isinstance(function, DescribedTool):
        return function.name
    name = getattr(function, "__name__", None)
    if not callable(function) or not isinstance(name, str) or not name.isidentifier():
        raise NoAnswer(f"a tool is a function with a name, not {type(function).__name__}")
    return name


def tool_schema(function: Tool) -> dict[str, Any]:
    """Return a tool's schema in OpenAI's format, from signature and docstring. Raises NoAnswer if a
    parameter has no JSON type."""
    if isinstance(function, DescribedTool):
        head = {"name": function.name, "description": function.about}
        return {"type": "function", "function": {**head, "parameters": dict(function.parameters)}}
    about, of_parameters = described(inspect.getdoc(function) or "")
    form = arguments_of(function)
    schemas, components = msgspec.json.schema_components([form])
    full = _inlined(schemas[0], components, ())
    properties = full.get("properties", {})
    for name, schema in properties.items():
        schema.pop("default", None)
        if name in of_parameters:
            schema["description"] = of_parameters[name]
    parameters = {"type": "object", "properties": properties, "required": full.get("required", [])}
    function_schema = {"name": tool_name(function), "description": about, "parameters": parameters}
    return {"type": "function", "function": function_schema}


def arguments_of(function: Tool) -> type[msgspec.Struct]:
    """Return arguments as a type for `msgspec.convert`; optional ones default to None. Raises
    NoAnswer."""
    name = tool_name(function)
    try:
        hints = get_type_hints(function, include_extras=True)
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError, NameError) as error:
        raise NoAnswer(f"tool `{name}`: {error}") from error
    fields: list[Any] = []
    for parameter in parameters:
        what = f"parameter `{parameter.name}` of tool `{name}`"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise NoAnswer(f"{what} cannot be passed by name: {parameter}")
        if parameter.name not in hints:
            raise NoAnswer(f"{what} has no annotation")
        kind = hints[parameter.name]
        try:
            msgspec.json.schema(kind)
        except (TypeError, ValueError) as error:
            raise NoAnswer(f"{what}: {kind} is not a JSON type") from error
        given = () if parameter.default is parameter.empty else (None,)
        fields.append((parameter.name, kind, *given))
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)


def _inlined(schema: Any, components: Mapping[str, Any], within: tuple[str, ...]) -> Any:
    """Replace references by their targets, for readability."""
    if isinstance(schema, list):
        return [_inlined(inner, components, within) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name in within:
            raise NoAnswer(f"`{name}` is recursive, which tool parameters do not support")
        return _inlined(components[name], components, (*within, name))
    plain = {
        key: _inlined(inner, components, within)
        for key, inner in schema.items()
        if key != "title" or not isinstance(inner, str)
    }
    match plain:
        case {"enum": [*values]} if all(isinstance(value, str) for value in values):
            return {"type": "string", **plain}
        case {"anyOf": [dict(inner), {"type": "null"}]}:
            return {**inner, "nullable": True}  # the form of transformers' templates
        case _:
            return plain


_SECTION = re.compile(
    r"^(args|arguments|parameters|params|returns?|yields?|raises|examples?|notes?):\s*$",
    re.IGNORECASE | re.MULTILINE,
)
_ENTRY = re.compile(r"^\*{0,2}(\w+)[ \t]*(?:\([^)\n]*\))?[ \t]*:[ \t]*(.*(?:\n[ \t]+.*)*)", re.M)


def described(doc: str) -> tuple[str, dict[str, str]]:
    """Return the description of a function and of each parameter from a Google-style docstring.

    Example: ``described("Add.\\n\\nArgs:\\n    a: One.") == ("Add.", {"a": "One."})``.
    """
    of_parameters: dict[str, str] = {}
    sections = list(_SECTION.finditer(doc))
    for index, section in enumerate(sections):
        if not section[1].lower().startswith(("arg", "param")):
            continue
        body = doc[section.end() : sections[index + 1].start() if sections[index + 1 :] else None]
        for entry in _ENTRY.finditer(inspect.cleandoc("\n" + body)):
            of_parameters[entry[1]] = " ".join(entry[2].split())
    about = doc[: sections[0].start() if sections else None]
    return "\n".join(line.rstrip() for line in about.strip().splitlines()), of_parameters
