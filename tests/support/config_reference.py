"""Configuration reference, from the docstrings of the sections."""

from __future__ import annotations

import ast
import json
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from dora_pipe.config import model, objectives, training
from dora_pipe.config.describe import Key, example, keys_of, section_types
from dora_pipe.config.model import Config

HEAD = """# Configuration

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
    "PortNumber": "integer, 0 to 65535",
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


def page() -> str:
    lines = [HEAD]
    for name, section, doc in section_types(Config, ""):
        lines += [f"\n## [{name}]\n", doc, "", "```toml", example(name), "```"]
        keys = keys_of(section, name)
        lines += ["", *(_item(key) for key in keys if key.basic)]
        if advanced := [_item(key) for key in keys if not key.basic]:
            lines += ["", "Advanced keys:", "", *advanced]
    return "\n".join(lines) + "\n"


def _item(key: Key) -> str:
    empty = key.default in ("", '""', "[]", "{}")
    default = "required" if key.default is None else "" if empty else f"`{key.default}`"
    kind = "" if key.kind == "free" else key.kind
    facts = filter(None, (_type(key.annotation), default, kind))
    return f"- `{key.name}` ({', '.join(facts)}): {key.doc}"


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
