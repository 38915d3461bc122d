"""Print a configuration as TOML with descriptions, from the docstrings of the sections."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.config import model, outside, training, workers
from dora_pipe.config.changes import kind_of
from dora_pipe.config.model import Config
from dora_pipe.config.section import Section
from dora_pipe.config.several import sections_of

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_KINDS: Mapping[str, str] = {
    "frozen": "a resumed run must have the same",
    "logged": "may change between steps; a change is recorded in the log",
    "free": "may change whenever the run is resumed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Key of a section."""

    section: str
    name: str
    annotation: str
    default: str | None
    """TOML; None for a required key."""
    kind: str
    doc: str
    basic: bool


def dump_toml(config: Config, *, every: bool = True) -> str:
    """Return the configuration as TOML that `load_config` reads, with a description of each key.
    Without `every`: basic keys, and keys that differ from their defaults."""
    lines = ["# The resolved configuration of a run."]
    lines += [f"# {kind}: {meaning}" for kind, meaning in _KINDS.items() if kind != "free"]
    for name, header, section, doc in _sections(config):
        values = [(key, getattr(section, key.name)) for key in keys_of(type(section), name)]
        shown = [
            line
            for key, value in values
            if not isinstance(value, dict) and (every or key.basic or _differs(key, value))
            for line in _shown(key, value)
        ]
        lines += ["", f"# {doc}", header, *shown] if shown else []
        for field in section.__struct_fields__:
            if isinstance(options := getattr(section, field), dict) and options:
                lines += ["", f"[{name}.{field}]"]
                lines += [f"{_key(k)} = {toml(v)}" for k, v in options.items()]
    return "\n".join(lines) + "\n"


@functools.cache
def _basic() -> str:
    """Return basic.toml: an example of each section, whose keys are the basic ones."""
    return Path(__file__).with_name("basic.toml").read_text(encoding="utf-8")


def example(name: str) -> str:
    """Return a section of basic.toml."""
    return _basic()[_basic().index(f"[{name}]\n") :].partition("\n\n")[0].rstrip()


def keys_of(section: type[Section], name: str) -> list[Key]:
    """Return the keys of a section, without subsections."""
    docs, basic = _docs()[section.__name__], tomllib.loads(example(name))
    for part in name.split("."):
        basic = basic[part]
    keys = []
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            continue
        keys.append(
            Key(
                section=name,
                name=field.name,
                annotation=docs.types[field.name],
                default=_default(field),
                kind=kind_of(f"{name}.{field.name}"),
                doc=docs.keys.get(field.name, ""),
                basic=field.name in basic,
            )
        )
    return keys


def toml(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            return _quoted(value)
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(toml(item) for item in value)}]"
        case Section():
            return toml(msgspec.to_builtins(value))
        case dict():
            inner = ", ".join(f"{_key(key)} = {toml(item)}" for key, item in value.items())
            return f"{{{inner}}}"
    raise TypeError(f"{type(value).__name__} is not a plain value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SectionDoc:
    doc: str
    keys: Mapping[str, str]
    types: Mapping[str, str]


@functools.cache
def _docs() -> dict[str, _SectionDoc]:
    """Read docstrings of fields from the source; they do not exist at run time."""
    modules = (model, outside, training, workers)
    trees = [ast.parse(inspect.getsource(module)) for module in modules]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {node.name: _section_doc(node) for node in classes}


def _section_doc(node: ast.ClassDef) -> _SectionDoc:
    keys: dict[str, str] = {}
    types: dict[str, str] = {}
    last = ""
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            last = item.target.id
            types[last] = ast.unparse(item.annotation)
        elif last and isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant):
            keys[last] = inspect.cleandoc(str(item.value.value)).replace("\n", " ")
    doc = (ast.get_docstring(node) or "").replace("\n", " ")
    return _SectionDoc(doc=doc, keys=keys, types=types)


def _sections(config: Config) -> Iterator[tuple[str, str, Section, str]]:
    several = {"task": len(config.tasks) > 1, "evaluation": len(config.evaluations) > 1}
    docs = {name: doc for name, _, doc in section_types(Config, "")}
    for name, _, section in sections_of(config):
        yield name, f"[[{name}]]" if several.get(name) else f"[{name}]", section, docs[name]
        for inner, _, doc in section_types(type(section), f"{name}."):
            own = getattr(section, inner.removeprefix(f"{name}."))
            yield inner, f"[{inner}]", own, doc


def section_types(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section], str]]:
    """Yield the name, type and description of each section, subsections included."""
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            own = _docs()[section.__name__].keys.get(field.name, "")
            doc = f"{_docs()[field.type.__name__].doc} {own}".strip()
            yield f"{prefix}{field.name}", field.type, doc
            yield from section_types(field.type, f"{prefix}{field.name}.")


def _differs(key: Key, value: Any) -> bool:
    return key.default != ("" if value is None else toml(value))


def _shown(key: Key, value: Any) -> list[str]:
    kind = "" if key.kind == "free" else f" ({key.kind})"
    comment = f"# {key.doc}{kind}"
    if value is None:
        return [comment, f"# {key.name} ="]
    return [comment, f"{key.name} = {toml(value)}"]


def _default(field: msgspec.structs.FieldInfo) -> str | None:
    if field.required:
        return None
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    return "" if value is None else toml(value)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else toml_escape(char) for char in quoted)


def toml_escape(char: str) -> str:
    """Escape a character; TOML has no surrogate pairs."""
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"
