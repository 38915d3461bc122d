"""Print a configuration as TOML with descriptions, and as the reference page, from the docstrings
of the sections."""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from dora_pipe.config import model, objectives, outside, storage, training, workers
from dora_pipe.config.changes import kind_of
from dora_pipe.config.model import Config
from dora_pipe.config.section import Section
from dora_pipe.config.several import sections_of

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")

_TYPES: Mapping[str, str] = {
    "Positive": "integer >= 1",
    "NonNegative": "integer >= 0",
    "GroupSize": "integer, 1 to 1000",
    "Threads": "integer, 1 to 4096",
    "GroupRedundancy": "integer, 0 to 999",
    "PositiveFloat": "number > 0",
    "PositiveFloat | Literal['auto']": 'number > 0, or "auto"',
    "NonNegative | Literal['auto']": 'integer >= 0, or "auto"',
    "NonNegativeFloat": "number >= 0",
    "Share": "number, 0 to 1",
    "Annotated[float, Meta(gt=0, le=1)]": "number > 0, <= 1",
    "Annotated[float, Meta(ge=0, lt=1)]": "number >= 0, < 1",
    "Annotated[int, Meta(ge=0, le=3)]": "integer, 0 to 3",
    "Annotated[int, Meta(ge=1, le=16)]": "integer, 1 to 16",
    "FullEvery | Literal['auto']": 'integer, 1 to 64, or "auto"',
    "RunName": "name",
    "Port": "integer, 0 to 65535",
    "RecordBytes": "integer, 65536 to 32505856",
    "float": "number",
    "str": "string",
    "str | tuple[str, ...]": "string or list",
    "bool": "boolean",
    "bool | Literal['offload']": 'boolean or "offload"',
    "tuple[str, ...]": "list of strings",
    "tuple[NonNegative, ...]": "list of integers",
    "tuple[Share, Share]": "two numbers, 0 to 1",
    "str | tuple[RewardUse, ...]": "string or list of tables",
    "tuple[McpServer, ...]": "list of tables",
    "dict[str, Any]": "table",
    "dict[str, str]": "table of strings",
    "dict[str, float | int | str | bool]": "table",
}

_KINDS: Mapping[str, str] = {
    "frozen": "a resumed run must have the same",
    "logged": "may change between steps; a change is recorded in the log",
    "free": "may change whenever the run is resumed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Key of the reference. Example: ``Key(section="rollout", name="group_size", type="integer,
    1 to 1000", default="8", kind="frozen", doc="Trajectories per group.", basic=True)``."""

    section: str
    name: str
    type: str
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


def reference() -> str:
    """Return docs/reference/configuration.md."""
    lines = [_HEAD]
    for name, section, doc in _section_types(Config, ""):
        lines += [f"\n## [{name}]\n", doc, "", "```toml", _example(name), "```"]
        keys = keys_of(section, name)
        lines += ["", *(_item(key) for key in keys if key.basic)]
        if advanced := [_item(key) for key in keys if not key.basic]:
            lines += ["", "Advanced keys:", "", *advanced]
    return "\n".join(lines) + "\n"


def _item(key: Key) -> str:
    empty = key.default in ("", '""', "[]", "{}")
    default = "required" if key.default is None else "" if empty else f"`{key.default}`"
    kind = "" if key.kind == "free" else key.kind
    return f"- `{key.name}` ({', '.join(filter(None, (key.type, default, kind)))}): {key.doc}"


@functools.cache
def _basic() -> str:
    """Return basic.toml: an example of each section, whose keys are the basic ones."""
    return Path(__file__).with_name("basic.toml").read_text(encoding="utf-8")


def _example(name: str) -> str:
    return _basic()[_basic().index(f"[{name}]\n") :].partition("\n\n")[0].rstrip()


def keys_of(section: type[Section], name: str) -> list[Key]:
    """Return the keys of a section, without subsections."""
    docs, basic = _docs()[section.__name__], tomllib.loads(_example(name))
    for part in name.split("."):
        basic = basic[part]
    keys = []
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            continue
        written = docs.types[field.name]
        keys.append(
            Key(
                section=name,
                name=field.name,
                type=_type(written),
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
    modules = (model, outside, storage, training, workers)
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
    docs = {name: doc for name, _, doc in _section_types(Config, "")}
    for name, _, section in sections_of(config):
        yield name, f"[[{name}]]" if several.get(name) else f"[{name}]", section, docs[name]
        for inner, _, doc in _section_types(type(section), f"{name}."):
            own = getattr(section, inner.removeprefix(f"{name}."))
            yield inner, f"[{inner}]", own, doc


def _section_types(section: type[Section], prefix: str) -> Iterator[tuple[str, type[Section], str]]:
    for field in msgspec.structs.fields(section):
        if isinstance(field.type, type) and issubclass(field.type, Section):
            own = _docs()[section.__name__].keys.get(field.name, "")
            doc = f"{_docs()[field.type.__name__].doc} {own}".strip()
            yield f"{prefix}{field.name}", field.type, doc
            yield from _section_types(field.type, f"{prefix}{field.name}.")


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


def _type(written: str) -> str:
    plain = written.removesuffix(" | None")
    if plain.startswith("objectives."):
        return _choice(typing.get_args(getattr(objectives, plain.partition(".")[2])))
    for module in (model, training):
        if typing.get_origin(named := getattr(module, plain, None)) is typing.Literal:
            return _choice(typing.get_args(named))
    return _TYPES.get(plain) or _literal(plain)


def _literal(written: str) -> str:
    node = ast.parse(written, mode="eval").body
    assert isinstance(node, ast.Subscript), written
    values = ast.literal_eval(node.slice)
    return _choice(values if isinstance(values, tuple) else [values])


def _choice(values: Sequence[Any]) -> str:
    return ", ".join(json.dumps(value) for value in values)


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _quoted(name)


def _quoted(text: str) -> str:
    """Return a TOML basic string without raw control characters."""
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(char if char.isprintable() else toml_escape(char) for char in quoted)


def toml_escape(char: str) -> str:
    """Escape a character; TOML has no surrogate pairs."""
    return f"\\u{ord(char):04x}" if ord(char) <= 0xFFFF else f"\\U{ord(char):08x}"


_HEAD = """# Configuration

<!-- Written by `python -m tests.support.reference_pages`; change the docstrings in config/. -->

One TOML file is the configuration of a run. `-o section.key=value` overrides a key; the value is
TOML, and a bare word is a string:

```console
$ dora-pipe run examples/arithmetic.toml -o run.steps=20 -o trainer.learning_rate=1e-4
```

`dora-pipe config FILE` prints the basic keys and all keys that differ from their defaults; `--all`
prints every key. Relative paths in a file start at the folder of the file, those in an override at
the current directory. No key holds a secret: see docs/clusters.md.

Parentheses contain the value, the default if it is not empty, and the kind of the key:

- *frozen*: resuming the run with another value is an error.
- *logged*: `dora-pipe set RUN KEY=VALUE` or a resume changes the key from the next step on. The log
  records the change.
- neither: a resume may change the key.

The examples of all sections together are one valid configuration."""
