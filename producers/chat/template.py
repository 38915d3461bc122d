"""Chat template of a model: lookup, compilation, rendering.

Rendering matches transformers, except that `strftime_now` returns the configured time.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dora_pipe.core.errors import PolicyError, TaskError, install_hint

if TYPE_CHECKING:
    import jinja2

FILE: Final = "chat_template.jinja"
"""Name of the template's file, also for an override."""

_CONFIGS: Final = ("tokenizer_config.json", "chat_template.json", "processor_config.json")
_OTHERS: Final = "additional_chat_templates"

_SPECIAL: Final = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Tokens that transformers passes to a template by name, such as `bos_token`."""

NONCHARACTERS: Final = "".join(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode noncharacters U+FDD0 to U+FDEF, absent from texts."""

_ESCAPED: Final = re.compile(r"\\ufd([de][0-9a-f])")


def find_templates(assets: Path) -> dict[str, str]:
    """Return the chat templates of a model directory by name: `default` and sometimes `tool_use`.
    Raises PolicyError."""
    templates: dict[str, str] = {}
    for name in reversed(_CONFIGS):
        value = read_object(assets / name).get("chat_template")
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, list):
            templates |= {template["name"]: template["template"] for template in value}
        elif isinstance(value, dict):
            templates |= value
    file = assets / FILE
    if file.is_file():  # The file precedes templates in the configs.
        templates = {"default": read_template(file)}
    for more in sorted((assets / _OTHERS).glob("*.jinja")):
        templates[more.stem] = read_template(more)
    return templates


def template_text(templates: Mapping[str, str], *, tools: bool) -> str:
    """Return the template for conversations with or without tools. Raises PolicyError without a
    default."""
    if tools and "tool_use" in templates:
        return templates["tool_use"]
    if "default" in templates:
        return templates["default"]
    raise PolicyError(
        f"the model's chat templates are {', '.join(sorted(templates))}, without `default`",
        hint="choose one with model.chat_template",
    )


def read_template(path: Path) -> str:
    """Return the text of a template file. Raises PolicyError."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"the chat template {path} cannot be read: {error}") from None


def special_tokens(assets: Path) -> dict[str, str]:
    """Return the special tokens of the model's files by their names in templates."""
    tokens: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_object(assets / name).items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.removesuffix("_token") in _SPECIAL and isinstance(token, str):
                tokens[key] = token
    return {key: token for key, token in tokens.items() if key.endswith("_token")}


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; return an empty one if the file is missing. Raises PolicyError."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise PolicyError(f"{path} is not a JSON object")
    return value


class Template:
    """Template with its variables. Raises PolicyError for an invalid template."""

    def __init__(self, text: str, *, values: Mapping[str, Any], now_ns: int) -> None:
        self._compiled = _compiled(text, now_ns // 1_000_000_000)
        self._values = dict(values)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        generate: bool,
    ) -> str:
        """Return the text of a conversation; `generate` opens the model's turn. Raises
        TaskError."""
        import jinja2

        try:
            return self._compiled.render(
                messages=messages,
                tools=list(tools) or None,
                documents=None,
                add_generation_prompt=generate,
                **self._values,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
        ) as error:
            raise TaskError(f"the chat template refuses this conversation: {error}") from None


@functools.lru_cache(maxsize=8)
def _compiled(text: str, now_s: int) -> jinja2.Template:
    """Cached per process: compiling takes tens of milliseconds."""
    try:
        import jinja2
        import jinja2.ext
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise PolicyError("chat templates need jinja2", hint=install_hint("torch")) from None
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_generation_blocks(), jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _strftime(now_s)
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        raise PolicyError(f"the chat template is not a Jinja template: {error}") from None


def _generation_blocks() -> type[jinja2.ext.Extension]:
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationBlocks(Extension):
        def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A new scope, as in transformers: assignments inside do not leave it.
            return nodes.Scope(body).set_lineno(line)

    GenerationBlocks.tags = {"generation"}
    return GenerationBlocks


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Dump JSON as transformers does (jinja2's filter escapes HTML), keeping the marks of
    `safe_text`."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return _ESCAPED.sub(lambda match: chr(int("fd" + match[1], 16)), text) if ensure_ascii else text


def _raise(message: str) -> str:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime(now_s: int) -> Callable[[str], str]:
    moment = datetime.fromtimestamp(now_s, UTC)
    return moment.strftime
