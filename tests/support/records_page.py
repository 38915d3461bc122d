"""Prints reference/records.md from the code: every topic, record and field, with type and meaning.

    python -m tests.support.records_page > docs/reference/records.md

A field's meaning is the docstring under it or, for a name that means the same everywhere, its
line in `COMMON`; one that has neither is an error. Sections that a person wrote lie in
`records_texts`; what this code computes of them is put in by `records_examples`.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import sys
import typing
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa

from dora_pipe.consumers import contributions
from dora_pipe.schemas import (
    contexts,
    control,
    dead_letter,
    identity,
    metrics,
    policy,
    rounds,
    routes,
    topics,
    trajectory,
    trajectory_codec,
)
from tests.support.records_examples import figures
from tests.support.records_words import (
    COLUMN_MEANINGS,
    COMMON,
    CONTRIBUTIONS,
    LETTER,
    PARTS,
    TOPICS,
)

TEXTS = Path(__file__).parent / "records_texts"

MODULES = (control, rounds, metrics, policy, trajectory, contexts)

WORDS: dict[str, Any] = {
    "ExclusiveRole": control.ExclusiveRole,
    "Fate": rounds.Fate,
    "FinishReason": control.FinishReason,
    "Purpose": identity.Purpose,
    "SegmentKind": trajectory.SegmentKind,
}

COLUMNS = {
    "utf8": "string",
    "string": "utf8",
    "float": "float32",
    "double": "float64",
}


def page() -> str:
    return "\n".join(
        [
            _text("head"),
            _text("places"),
            _text("values"),
            *_topics(),
            _text("identity"),
            _text("digests"),
            _text("reading"),
            "## control\n",
            *_union(control.AnyControl, control),
            "## decisions\n",
            *_record("Round", rounds),
            "### Observations\n",
            *_union(rounds.AnyObservation, rounds, level=4),
            "### Decisions\n",
            *_union(rounds.AnyDecision, rounds, level=4),
            "## metrics\n",
            *_union(metrics.AnyMetrics, metrics),
            *_arrow_topics(),
            "## dead-letters\n",
            LETTER.format(header=dead_letter.HEADER),
            _text("contributions"),
            *_contributions(),
            "## Parts of records\n",
            *[line for name, module in PARTS for line in _part(name, module)],
            *_words(),
        ]
    )


def _topics() -> list[str]:
    rows = [
        (f"`<run>.{name}`", where.partitions, where.key, where.value, _property(name))
        for name, where in TOPICS.items()
    ]
    head = ("topic", "partitions", "key", "value", "what for")
    return ["## Topics\n", *_table(head, rows), _text("keys")]


def _text(name: str) -> str:
    """A section that a person wrote, with its figures and worked examples filled in."""
    return (TEXTS / f"{name}.md").read_text().format_map(_figures())


_figures = cache(figures)


def _contributions() -> list[str]:
    rows = [
        (
            f"`{field.name}`",
            f"`{_arrow_type(field.type)}`" + (" (may be null)" if field.nullable else ""),
            CONTRIBUTIONS.get(field.name) or COMMON[field.name],
        )
        for field in contributions.WITH_TEACHER
    ]
    return _table(("column", "type", "meaning"), rows)


def _property(name: str) -> str:
    attribute = getattr(topics.Topics, name.replace("-", "_"))
    return _sentence(attribute.__doc__)


def _arrow_topics() -> list[str]:
    return [
        "## trajectories\n",
        "### Headers\n",
        *_fields("Headers", trajectory),
        "### Columns\n",
        *_columns(trajectory_codec.TRAJECTORY.routed.schema, "Trajectory", trajectory),
        "### An entry of `segments`\n",
        *_segments(),
        "### `routed_experts`\n",
        *_fields("Routes", routes),
        "### The object in `meta_json`\n",
        *_fields("Meta", trajectory),
        "## progress\n",
        "What was sampled of a request of one turn:\n",
        *_columns(trajectory_codec.PROGRESS.routed.schema, "Progress", trajectory),
        "A call of an agent; it has a column `call_json`:\n",
        *_columns(trajectory_codec.TURN_PROGRESS.routed.schema, "TurnProgress", trajectory),
        "A part of an episode that can be told again; it has a column `segments`:\n",
        *_columns(trajectory_codec.EPISODE_PROGRESS.routed.schema, "EpisodeProgress", trajectory),
    ]


def _union(union: Any, module: ModuleType, level: int = 3) -> Iterator[str]:
    for kind in typing.get_args(union):
        yield from _record(kind.__name__, module, level)


def _record(name: str, module: ModuleType, level: int = 3) -> Iterator[str]:
    kind = getattr(module, name)
    tag = kind.__struct_config__.tag
    yield f"{'#' * level} {tag or name}\n"
    yield f"{_sentence(kind.__doc__)}\n"
    yield from _fields(name, module)


def _part(name: str, module: str) -> Iterator[str]:
    found = next(one for one in MODULES if one.__name__.endswith(f".{module}"))
    kind = getattr(found, name)
    array = ", a JSON array in this order" if kind.__struct_config__.array_like else ""
    yield f"### {name}\n"
    yield f"{_sentence(kind.__doc__)}{'' if not array else f' On the wire{array}.'}\n"
    yield from _fields(name, found)


def _fields(name: str, module: ModuleType) -> list[str]:
    rows = [
        (f"`{field}`", f"`{kind}`" + ("" if required else " (may be absent)"), meaning)
        for field, kind, required, meaning in fields_of(name, module)
    ]
    return _table(("field", "type", "meaning"), rows) if rows else []


def _columns(schema: pa.Schema, name: str, module: ModuleType) -> list[str]:
    known = {field: meaning for field, _, _, meaning in fields_of(name, module)}
    rows = []
    for field in schema:
        meaning = COLUMN_MEANINGS.get(field.name) or known[field.name]
        null = " (may be null)" if field.nullable else ""
        rows.append((f"`{field.name}`", f"`{_arrow_type(field.type)}`{null}", meaning))
    return _table(("column", "type", "meaning"), rows)


def _segments() -> list[str]:
    """The fields of a segment with the types that they have in Arrow."""
    struct = trajectory_codec.TRAJECTORY.schema.field("segments").type.value_type
    kinds = {field.name: _arrow_type(field.type) for field in struct}
    rows = [
        (f"`{name}`", f"`{kinds[name]}`", meaning)
        for name, _, _, meaning in fields_of("Segment", trajectory)
    ]
    return _table(("field", "type", "meaning"), rows)


def _arrow_type(kind: pa.DataType) -> str:
    if pa.types.is_struct(kind):
        return "struct"
    if pa.types.is_list(kind):
        inner = kind.value_type
        return f"list<{'struct' if pa.types.is_struct(inner) else _arrow_type(inner)}>"
    return COLUMNS.get(str(kind), str(kind))


def _words() -> list[str]:
    rows = [
        (f"`{name}`", ", ".join(f"`{word}`" for word in typing.get_args(kind)))
        for name, kind in sorted(WORDS.items())
    ]
    return ["## Closed sets of words\n", *_table(("type", "words"), rows)]


def fields_of(name: str, module: ModuleType) -> list[tuple[str, str, bool, str]]:
    """(field, type, required, meaning) of a record, its base's fields first."""
    node = _class(name, module)
    found = []
    for base in node.bases:
        if isinstance(base, ast.Name) and hasattr(module, base.id):
            found += fields_of(base.id, module)
    body = [*node.body, ast.Pass()]
    for one, following in itertools.pairwise(body):
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
            field = one.target.id
            meaning = _docstring(following) or COMMON.get(f"{name}.{field}") or COMMON.get(field)
            assert meaning, f"{name}.{field} has no meaning: write a docstring under it"
            required = one.value is None
            found.append((field, ast.unparse(one.annotation), required, _one_line(meaning)))
    return found


def _class(name: str, module: ModuleType) -> ast.ClassDef:
    tree = ast.parse(inspect.getsource(module))
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def _docstring(node: ast.stmt) -> str | None:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return str(node.value.value)
    return None


def _sentence(doc: str | None) -> str:
    """The first paragraph."""
    assert doc
    return _one_line(inspect.cleandoc(doc).split("\n\n")[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *lines, ""]


if __name__ == "__main__":
    sys.stdout.write(page())
