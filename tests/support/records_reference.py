"""Lists of docs/reference/records.md, from the records and their docstrings."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import re
import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa

from dora_pipe.consumers import contributions
from dora_pipe.schemas import control, dead_letter, metrics, rounds, routes, trajectory
from dora_pipe.schemas import trajectory_codec as codec
from dora_pipe.schemas.wire import kebab
from tests.support.tidy import ROOT

WORDS = {
    control: ("ExclusiveRole", "FinishReason"),
    rounds: ("Outcome", "SampleOutcome", "Purpose"),
    trajectory: ("SegmentKind",),
}


def lines() -> Iterator[str]:
    """Yield the generated lines of the page; a repeated description appears once."""
    observed: set[str] = set()
    for line in _lines():
        field, described, _ = line.partition("): ")
        yield f"{field})" if described and line in observed else line
        observed.add(line)


def _lines() -> Iterator[str]:
    yield from ("## control", "", *_kinds(control.AnyControl))
    yield from ("## decisions", "", *_record("### Round", rounds.Round))
    yield from (*_kinds(rounds.AnyObservation), *_kinds(rounds.AnyDecision))
    yield from ("## metrics", "", *_kinds(metrics.AnyMetrics))
    yield from ("## trajectories", "", *_columns(codec.TRAJECTORY))
    for kind in (trajectory.Headers, trajectory.Segment, routes.Routes, trajectory.Meta):
        yield from _record(f"### {kind.__name__}", kind)
    yield from ("## progress", "")
    for layout in (codec.PROGRESS, codec.TURN_PROGRESS):
        yield from _columns(layout)
    yield from _record("## dead-letters", vars(dead_letter)["_Letter"])
    rows = [(column.name, _arrow(column.type), "") for column in contributions.WITH_TEACHER]
    yield from _list("## contributions", _docs(contributions)["SCHEMA"], rows)
    yield from ("## Parts of records", "")
    for part in _parts(control.AnyControl, rounds.AnyDecision, metrics.AnyMetrics, trajectory.Meta):
        yield from _record(f"### {part.__name__}", part)
    yield from ("## Closed sets of words", "")
    for module, names in WORDS.items():
        for name in names:
            words = ", ".join(f"`{word}`" for word in typing.get_args(vars(module)[name]))
            yield f"- `{name}`: {words}. {_text(_docs(module).get(name, ''))}".rstrip()
    yield ""


def _kinds(union: Any) -> Iterator[str]:
    for kind in typing.get_args(union):
        yield from _record(f"### {kebab(kind.__name__)}", kind)


def _record(title: str, kind: Any) -> Iterator[str]:
    rows, config = [], kind.__struct_config__
    for field in msgspec.structs.fields(kind):
        owner = next(base for base in kind.__mro__ if field.name in base.__annotations__)
        optional = "?" * (config.omit_defaults and not field.required)
        note = _type(owner.__annotations__[field.name])
        rows.append((field.name + optional, note, _docs(owner).get(field.name, "")))
    array = config.array_like and kind is not trajectory.Headers
    return _list(title, _text(kind.__doc__) + " A JSON array in this order." * array, rows)


def _columns(layout: codec.RecordLayout[Any]) -> Iterator[str]:
    record = vars(layout)["_record"]
    rows = [
        (own.name or name, _arrow(own.kind, null=own.nullable), _docs(record).get(name, ""))
        for name, own in layout.routed.columns.items()
    ]
    return _list(f"### {record.__name__}", record.__doc__, rows)


def _list(title: str, intro: str, rows: list[tuple[str, str, str]]) -> Iterator[str]:
    yield from (title, "", _text(intro), "")
    for described, fields in itertools.groupby(rows, lambda row: bool(row[2])):
        if described:
            yield from (f"- `{name}` ({kind}): {_text(text)}" for name, kind, text in fields)
            continue
        yield "- " + ", ".join(
            f"`{name}`" + f" ({kind})" * (name.rstrip("?") not in _common())
            for name, kind, _ in fields
        )
    yield from [""] if rows else []


@functools.cache
def _common() -> set[str]:
    page = (ROOT / "docs/reference/records.md").read_text().partition("<!--")[0]
    heads = re.findall("^- (`.*?):", page.partition("## Common fields")[2], re.MULTILINE)
    return {name for head in heads for name in re.findall(r"`(\w+)`", head)}


def _text(doc: str) -> str:
    text = " ".join(inspect.cleandoc(doc).partition("\n\n")[0].split())
    return re.sub(r"\bNone\b", "null", re.sub(r"\s*Example: ``.*", "", text))


def _type(note: str) -> str:
    note = note.replace("float | int | str | bool", "scalar").replace("tuple[str, str]", "pair")
    note = re.sub(r"tuple\[(.*), \.\.\.\]", r"\1[]", note).replace("dict[str, ", "map[")
    note = re.sub(r"Literal\[.*\]", "str", note).replace(" | None", "?")
    return re.sub(r"\bAny", "", note.replace("Any]", "any]"))


def _arrow(kind: pa.DataType, *, null: bool = False) -> str:
    text = re.sub(r"list<(item|element): (.*)>", r"\2[]", str(kind)).replace("fixed_size_", "")
    return re.sub(r"struct<.*>", "Segment" if "[]" in text else "Routes", text) + "?" * null


@functools.cache
def _docs(owner: Any) -> dict[str, str]:
    tree: Any = ast.parse(inspect.getsource(owner))
    body = tree.body if inspect.ismodule(owner) else tree.body[0].body
    return {
        ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0]): text
        for node, doc in itertools.pairwise(body)
        if isinstance(node, ast.AnnAssign | ast.Assign) and isinstance(doc, ast.Expr)
        if isinstance(text := getattr(doc.value, "value", None), str)
    }


def _parts(*kinds: Any, named: bool = False) -> dict[type, None]:
    parts: dict[type, None] = {}
    for kind in kinds:
        struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
        parts |= {kind: None} if struct and named else {}
        inner = [field.type for field in msgspec.structs.fields(kind)] if struct else None
        parts |= _parts(*(inner or typing.get_args(kind)), named=named or struct)
    return parts
